"""Past runs: list them in order, read the record of one, find one.

A run's folder is named `<start time>-<manifest name>-<number>`. The number counts the runs of an artifacts folder and
gives their order: a clock that once was ahead cannot make an old run the newest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ptpipe.errors import IntegrityError, Problem, PtpipeError, UsageError, nearest
from ptpipe.store.documents import read_document
from ptpipe.store.store import Store

# Ids of former versions end in four random hex digits: they sort before all others, by time.
_RUN_ID = re.compile(r"(\d{8}-\d{6})-([A-Za-z0-9][A-Za-z0-9_.-]*)-(?:[0-9a-f]{4}|(\d{5,9}))")
_MAX_CANDIDATES = 200  # for "did you mean"

_RECORD: dict[str, type | tuple[type, ...]] = {
    "name": str, "manifest": str, "seed": int, "overrides": dict, "started_at": str, "seconds": (int, float),
    "exit_code": int, "finished": bool, "machine": dict, "keys": dict, "stages": list,
}  # fmt: skip
_STAGE: dict[str, type | tuple[type, ...]] = {
    "stage_id": str, "kind": str, "outcome": str, "seconds": (int, float), "key": str, "metrics": dict,
    "notices": list, "outputs": dict, "message": str, "deliverables": list, "parts": dict,
}  # fmt: skip
_OUTPUT: dict[str, type | tuple[type, ...]] = {"digest": str}
_MACHINE: dict[str, type | tuple[type, ...]] = {"processor": str, "num_cpus": int, "fingerprint": str}


class Run(NamedTuple):
    """A run, as its folder's name tells it."""

    number: int
    started: str
    """UTC, `YYYYMMDD-HHMMSS`, by the clock of then."""
    name: str
    """The manifest's."""
    id: str
    """The folder's name."""
    parent: Path

    @property
    def folder(self) -> Path:
        """The folder with `record.json`, the log, reports and deliverables."""
        return self.parent / self.id


def list_runs(store: Store, name: str | None = None) -> list[Run]:
    """Return all runs, or those of manifests called `name`, newest first. No record is read.

    Raises PtpipeError where the folder of runs can't be listed.
    """
    parent = store.root / "runs"
    try:
        with os.scandir(parent) as found:
            folders = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise PtpipeError(f"cannot read {parent}: {error.strerror or error}") from error
    runs = [
        Run(int(match[3] or 0), match[1], match[2], match[0], parent)
        for match in map(_RUN_ID.fullmatch, folders)
        if match and name in (None, match[2])
    ]
    return sorted(runs, reverse=True)


def next_run_number(folder: Path) -> int:
    """Return a number above those of all runs in `runs/`; hold a lock until the run's folder exists."""
    matches = (_RUN_ID.fullmatch(path.name) for path in folder.iterdir())
    return max((int(match[3] or 0) for match in matches if match), default=0) + 1


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record in `folder`, a run's.

    Raises IntegrityError where it is missing, altered, another run's or of another version's form, PtpipeError where it
    can't be read.
    """
    path = folder / "record.json"
    try:
        record = read_document(path)
    except FileNotFoundError as error:
        raise IntegrityError(f"the record of run {folder.name} is missing: {path}") from error
    except OSError as error:
        raise PtpipeError(f"cannot read {path}: {error.strerror or error}") from error
    except (IntegrityError, ValueError, RecursionError) as error:
        raise IntegrityError(f"the record of run {folder.name} was altered: {path}") from error
    if record.get("run_id") != folder.name:
        raise IntegrityError(f"the record of run {folder.name} was altered: it is that of another run: {path}")
    if not _is_record(record):
        raise IntegrityError(f"the record of run {folder.name} was written by another version of ptpipe: {path}")
    return record


def _is_record(value: Mapping[str, Any]) -> bool:
    if not _has(value, _RECORD) or not _has(value["machine"], _MACHINE):
        return False
    stages = value["stages"]
    if not all(_has(stage, _STAGE) for stage in stages):
        return False
    texts = [*value["keys"].values(), *(name for stage in stages for name in stage["deliverables"])]
    outputs = [output for stage in stages for output in stage["outputs"].values()]
    return all(isinstance(text, str) for text in texts) and all(_has(output, _OUTPUT) for output in outputs)


def _has(value: object, types: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Return whether a JSON value is an object with at least these members, of these types."""
    return isinstance(value, dict) and all(isinstance(value.get(name), type_) for name, type_ in types.items())


def run_records(store: Store, name: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of all runs, or of those of one manifest name, newest first, read lazily.

    Records that can't be read are skipped: `read_record` says why.
    """
    for run in list_runs(store, name):
        try:
            yield read_record(run.folder)
        except PtpipeError:
            continue


def find_run(store: Store, wanted: str) -> tuple[dict[str, Any], Path]:
    """Return the record and folder of the run `wanted`: its id, the unambiguous start or end of one, or `last`.

    Raises UsageError where no run or several runs match, and what `read_record` raises. No other record is read.
    """
    if not wanted:  # a variable that a script did not set: every id begins with it
        raise UsageError("the id of the run is empty; `last` is the newest one")
    runs = list_runs(store)
    matching = [run for run in runs if wanted == run.id] or [
        run for run in runs if run.id.startswith(wanted) or run.id.endswith(wanted)
    ]
    if wanted == "last" and runs:
        matching = runs[:1]
    if len(matching) == 1:
        return read_record(matching[0].folder), matching[0].folder
    if matching:
        raise UsageError(f"{wanted!r} matches {len(matching)} runs; give more of the id")
    suggestion = nearest(wanted, [run.id for run in runs[:_MAX_CANDIDATES]])
    raise UsageError(str(Problem(f"there is no run {wanted!r} under {store.root}", suggestion=suggestion)))
