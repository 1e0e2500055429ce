"""Artifacts folders made up quickly: through the store's own functions, but without stages and without fsync."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

from ptpipe import Artifact
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.store import Entry, Store, StoredObject


@dataclass
class Bytes(Artifact):
    """An artifact of any content."""

    content: bytes

    def save(self, folder: Path) -> None:
        (folder / "bytes").write_bytes(self.content)

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls((folder / "bytes").read_bytes())

    @classmethod
    def deliverables(cls, folder: Path) -> Sequence[str]:
        return ("bytes",)


@contextmanager
def without_fsync() -> Iterator[None]:
    """Write as fast as memory allows."""
    with mock.patch("os.fsync"):
        yield


def key_of(name: object) -> str:
    """A key, as good as any."""
    return hashlib.sha256(str(name).encode()).hexdigest()


def put_entry(store: Store, key: str, outputs: Mapping[str, StoredObject], inputs: Sequence[str] = ()) -> None:
    """Write an index entry."""
    store.put_entry(
        Entry(
            key=key, kind="toy.make", parts={"kind": "toy.make"}, inputs={"a": tuple(inputs)} if inputs else {},
            outputs=outputs, metrics={}, notices=(), seconds=0.1, made_at="2026-01-01T00:00:00+00:00",
        )
    )  # fmt: skip


def stage_facts(stage_id: str, key: str, outputs: Mapping[str, StoredObject] = {}, **changes: Any) -> dict[str, Any]:
    """A stage as a run's record has it."""
    return {
        "stage_id": stage_id, "kind": "toy.make", "outcome": "done", "seconds": 0.1, "key": key, "metrics": {},
        "notices": [], "outputs": {name: asdict(stored) for name, stored in outputs.items()}, "message": "",
        "frames": [], "made_at": "", "machine": "", "deliverables": [], "parts": {"kind": "toy.make"},
    } | changes  # fmt: skip


def write_record(store: Store, run_id: str, /, *facts: Mapping[str, Any], **changes: Any) -> Path:
    """Write a run's folder with the facts of its finished stages; returns its record's path."""
    record = {
        "run_id": run_id, "name": "toy", "manifest": "/m.yaml", "seed": 0, "overrides": {},
        "started_at": "2026-01-01T00:00:00.000", "seconds": 1, "exit_code": 0, "finished": True,
        "machine": {"processor": "x", "num_cpus": 1, "fingerprint": "f"},
        "keys": {stage["stage_id"]: stage["key"] for stage in facts}, "stages": list(facts),
    }  # fmt: skip
    path = store.root / "runs" / run_id / "record.json"
    path.parent.mkdir(parents=True)
    write_document(path, json.dumps(record | changes))
    return path


def deliver(store: Store, run: Path, stage_id: str, stored: StoredObject) -> str:
    """Link an object's file into a run's folder; returns its name there."""
    (run / stage_id).mkdir(parents=True, exist_ok=True)
    (run / stage_id / "bytes").hardlink_to(store.files(stored.digest) / "bytes")
    return f"{stage_id}/bytes"


def contents(root: Path) -> set[str]:
    """Every path below a folder."""
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


def check_run(store: Store, folder: Path) -> dict[str, Any]:
    """Assert that everything that a run's record lists is there and unaltered; returns the record."""
    record = read_document(folder / "record.json")
    fresh = Store(store.root)  # verifies each object anew
    for stage in record["stages"]:
        for output in stage["outputs"].values():
            fresh.verify(output["digest"])
        for name in stage["deliverables"]:
            assert (folder / name).read_bytes()
    return record


def check_index(store: Store) -> None:
    """Assert that every entry that counts leads to whole objects."""
    fresh = Store(store.root)
    for path in (store.root / "index").glob("*.json"):
        entry = fresh.entry(path.stem)
        for stored in entry.outputs.values() if entry else ():
            fresh.verify(stored.digest)


def fill(store: Store, num_objects: int, num_runs: int) -> None:
    """Write objects, each with its entry, and runs that share them out: half of them named `toy`, half of 50 names."""
    stages = []
    with without_fsync():
        store.open_for_writing()
        for number in range(num_objects):
            stored = store.put(Bytes(number.to_bytes(4, "big")))
            put_entry(store, key_of(number), {"output": stored})
            stages.append(stage_facts(f"s{number % 100}", key_of(number), {"output": stored}, deliverables=[]))
        share = num_objects // num_runs
        for number in range(num_runs):
            name = "toy" if number % 2 else f"other-{number % 100 // 2}"
            mine = stages[number * share : (number + 1) * share]
            write_record(store, f"20260101-000000-{name}-{number + 1:05}", *mine, name=name)
