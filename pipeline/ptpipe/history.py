"""Runs that were: their records, and what the next run will find cached."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ptpipe.errors import ManifestError, Problem, UsageError, nearest
from ptpipe.events import Outcome
from ptpipe.keys import Key, differences
from ptpipe.plan import Plan
from ptpipe.store import Entry, Store

_LENGTH_OF_TIME = len("20260102-030405")
_NEEDED = {"name", "started_at", "seconds", "exit_code", "finished", "keys", "stages"}
_MADE = (Outcome.DONE, Outcome.CACHED, Outcome.REFUSED)


@dataclass(frozen=True)
class Forecast:
    """What a run would do with a stage, and why."""

    stage_id: str
    key: Key
    entry: Entry | None
    """The stored result that would be used; None where the stage would work."""
    reasons: tuple[str, ...] = ()
    """Why it would work."""


def forecast(plan: Plan, keys: Mapping[str, Key], store: Store, fresh: Collection[str] = ()) -> list[Forecast]:
    """Say of each stage whether its result is there, or what differs from the last run of this manifest's name.

    Raises ManifestError where a name in `fresh` is no stage's.
    """
    ids = [stage.id for stage in plan.stages]
    if unknown := [name for name in fresh if name not in ids]:
        raise ManifestError(
            Problem(f"--fresh {name}: there is no stage {name!r}", suggestion=nearest(name, ids)) for name in unknown
        )
    past = _Past(plan.manifest.name, store)
    result: list[Forecast] = []
    entries: dict[str, Entry | None] = {}
    for stage in plan.stages:
        key = keys[stage.id]
        entry = None if stage.id in fresh else store.entry(key.digest)
        if entry is not None and not is_current(entry, plan, stage.id, entries):
            entry = None
        entries[stage.id] = entry
        reasons = () if entry else tuple(_reasons(plan, stage.id, key, past, fresh, entries))
        result.append(Forecast(stage.id, key, entry, reasons))
    return result


def is_current(entry: Entry, plan: Plan, stage_id: str, upstream: Mapping[str, Entry | None]) -> bool:
    """Whether a result was made from the very objects that the stages above have now.

    Keys alone don't tell after `--fresh`, or after a lost object was made again: a measured value, or a stage that
    isn't reproducible, gives another object under the same key. A stage above that will work (None) is trusted to
    give what it gave before; the run looks again once it knows.
    """
    for port, references in plan[stage_id].wiring.items():
        for reference, digest in zip(references, entry.inputs.get(port, ()), strict=False):
            made = upstream.get(reference.stage)
            if made is not None and made.outputs[reference.output].digest != digest:
                return False
    return True


def _reasons(
    plan: Plan, stage_id: str, key: Key, past: _Past, fresh: Collection[str], entries: Mapping[str, Entry | None]
) -> Iterator[str]:
    if stage_id in fresh:
        yield "asked for with --fresh"
        return
    old = past.parts(stage_id)
    if old is None:
        yield "never made under this name"
        return
    lines = differences(old, key.parts)
    for line in lines:
        if not line.startswith("inputs."):
            yield line
    changed = [name for name in plan[stage_id].upstream if entries.get(name) is None]
    if changed and any(line.startswith("inputs.") for line in lines):
        yield f"changed above: {', '.join(changed)}"
    elif any(line.startswith("inputs.") for line in lines):
        yield "bound to other inputs"
    if not lines:
        yield "its result is gone, was altered, or was never finished"


class _Past:
    """What each stage was last made of in runs of one name; records are read as far back as need be."""

    def __init__(self, name: str, store: Store) -> None:
        self._records = (record for record in run_records(store, name) if record["name"] == name)
        self._parts: dict[str, Mapping[str, Any]] = {}

    def parts(self, stage_id: str) -> Mapping[str, Any] | None:
        while stage_id not in self._parts:
            record = next(self._records, None)
            if record is None:
                return None
            for stage in record["stages"]:
                if stage["outcome"] in _MADE:
                    self._parts.setdefault(stage["stage_id"], stage["parts"])
        return self._parts[stage_id]


def run_records(store: Store, name: str = "") -> Iterator[dict[str, Any]]:
    """The records of all runs (or of those with this in their id), newest first, read one by one.

    A folder without a readable record is passed over. `run_id` is the folder's name, whatever the record says.
    """
    folders = sorted((store.root / "runs").glob(f"*-{name}*"), reverse=True)
    for _, of_one_second in groupby(folders, key=lambda folder: folder.name[:_LENGTH_OF_TIME]):
        records = filter(None, map(_record, of_one_second))
        yield from sorted(records, key=lambda record: str(record["started_at"]), reverse=True)


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record | {"run_id": folder.name} if isinstance(record, dict) and record.keys() >= _NEEDED else None


def find_run(store: Store, wanted: str) -> tuple[dict[str, Any], Path]:
    """The record and folder of a run by id, by the unambiguous start or end of one, or `last`. Raises UsageError."""
    records = list(run_records(store))
    ids = [record["run_id"] for record in records]
    matching = [r for r in records if wanted == r["run_id"]] or [
        record for record in records if record["run_id"].startswith(wanted) or record["run_id"].endswith(wanted)
    ]
    if wanted == "last" and records:
        matching = records[:1]
    if len(matching) == 1:
        return matching[0], store.root / "runs" / matching[0]["run_id"]
    if matching:
        raise UsageError(f"{wanted!r} fits {len(matching)} runs; give more of the id")
    raise UsageError(str(Problem(f"there is no run {wanted!r} under {store.root}", suggestion=nearest(wanted, ids))))
