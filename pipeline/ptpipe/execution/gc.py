"""Garbage collection: deletes old runs, and the results that no kept run needs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
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
    """Disk space that becomes free: a file with several hard links counts once, and only if all of them go."""


def collect_garbage(store: Store, keep_runs: int, dry_run: bool = False) -> Garbage:
    """Delete all but the newest `keep_runs` runs of each manifest name, and the results that only those used.

    A run's deliverables go and stay with it; checkpoints of an unfinished stage stay while a kept run names its key.
    Raises PtpipeError while a run is active.
    """
    with store.exclusive():
        kept_runs, keys = _kept(store, keep_runs)
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
        size_bytes = _freed_bytes(dead)
        if not dry_run:
            for path in dead:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Garbage(len(old_runs), len(dead_objects), size_bytes)


def _kept(store: Store, keep_runs: int) -> tuple[set[str], set[str]]:
    """Return the ids of the runs to keep, and the keys of their stages."""
    seen: Counter[str] = Counter()
    run_ids: set[str] = set()
    keys: set[str] = set()
    for record in run_records(store):
        seen[record["name"]] += 1
        if seen[record["name"]] <= keep_runs:
            run_ids.add(record["run_id"])
            keys |= set(record["keys"].values())
    return run_ids, keys


def _freed_bytes(dead: Iterable[Path]) -> int:
    statuses = [file.stat() for path in dead for file in _files(path)]
    num_dead_links = Counter((status.st_dev, status.st_ino) for status in statuses)
    freed = {
        (status.st_dev, status.st_ino): status.st_size
        for status in statuses
        if num_dead_links[status.st_dev, status.st_ino] >= status.st_nlink
    }
    return sum(freed.values())


def _files(path: Path) -> Iterator[Path]:
    return (file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
