"""Deleting what no kept run needs."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ptpipe.store.runs import run_records
from ptpipe.store.store import Store


@dataclass(frozen=True)
class Garbage:
    """What was (or would be) deleted."""

    num_runs: int
    num_objects: int
    size_bytes: int


def collect_garbage(store: Store, keep_runs: int, dry_run: bool = False) -> Garbage:
    """Delete all but the newest `keep_runs` runs of each manifest name, and every result that only the others used.

    Checkpoints of unfinished stages stay while a kept run names their key. Raises PtpipeError while a run is going on.
    """
    with store.exclusive():
        seen: Counter[str] = Counter()
        keys: set[str] = set()
        kept_runs: set[str] = set()
        for record in run_records(store):
            seen[record["name"]] += 1
            if seen[record["name"]] <= keep_runs:
                kept_runs.add(record["run_id"])
                keys |= set(record["keys"].values())
        entries = [entry for key in keys if (entry := store.entry(key))]
        objects = {stored.digest for entry in entries for stored in entry.outputs.values()}
        root = store.root
        old_runs = [path for path in root.glob("runs/*") if path.name not in kept_runs]
        dead_objects = [path for path in root.glob("objects/[0-9a-f][0-9a-f]/*") if path.name not in objects]
        dead_objects += root.glob("objects/.new-*")
        dead = [
            *dead_objects,
            *old_runs,
            *(path for path in root.glob("index/*.json") if path.stem not in keys),
            *root.glob("index/.*"),  # what a killed process was writing
            *(path for path in root.glob("scratch/*") if path.name not in keys),
            *root.glob("quarantine/*"),
            *(path for path in root.glob("locks/*") if path.name != "in-use"),
        ]
        size_bytes = sum(_size(path) for path in dead)
        if not dry_run:
            for path in dead:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Garbage(len(old_runs), len(dead_objects), size_bytes)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
