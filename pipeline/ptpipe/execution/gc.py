"""Garbage collection: deletes old runs, and the results that no kept run needs.

What can't be read is kept, and so is all that it may need. The order of what is deleted may end anywhere: runs before
the results that they name, index entries before the objects that they name; and a folder is renamed before it is
deleted, so that no half of it is taken for the whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ptpipe.errors import PtpipeError
from ptpipe.store.documents import read_document
from ptpipe.store.files import sync
from ptpipe.store.runs import Run, list_runs, read_record
from ptpipe.store.store import Entry, Store

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\..+-[0-9a-f]{12}")  # what a killed `store.files.atomic_path` leaves
_HALF = re.compile(r"\.(new|old)-.+|" + _TEMPORARY.pattern)  # what any killed process leaves
_LOCK = re.compile(r"[0-9a-f]{64}|runs|nodes-[0-9a-f]{16}\.json|" + _TEMPORARY.pattern)  # all but the one that gc holds
_UNREADABLE = (PtpipeError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Garbage:
    """What was (or would be) deleted, and what was kept for a reason that the user should know."""

    paths: tuple[str, ...]
    """Relative to the artifacts folder; a folder stands for all that is in it."""
    num_runs: int
    num_objects: int
    size_bytes: int
    """Disk space that becomes free: a file with several hard links counts once, and only if all of them go."""
    quarantine: Mapping[str, int]
    """The objects that failed verification and stay: size in bytes by path."""
    problems: tuple[str, ...]
    """One line for each thing that can't be read or deleted, or is not ptpipe's: it was kept."""


def collect_garbage(store: Store, keep_runs: int, dry_run: bool = False, empty_quarantine: bool = False) -> Garbage:
    """Delete all but the newest `keep_runs` runs of each manifest name, and the results that only those used.

    A run's deliverables go and stay with it; checkpoints of an unfinished stage stay while a kept run names its key.
    While a record or an index entry can't be read, no result is deleted. `empty_quarantine`: also delete the objects
    that failed verification.
    Raises PtpipeError while a run is active, or where there is no artifacts folder.
    """
    with store.exclusive():
        survey = _Survey(store, keep_runs)
        quarantine = _children(store.root / "quarantine")
        leftovers = survey.leftovers + (quarantine if empty_quarantine else [])
        steps = (survey.old_runs + survey.old_sweeps, survey.dead_entries, survey.dead_objects + survey.dead_scratch)
        statuses = {path: [*_statuses(path)] for paths in (leftovers, *steps) for path in paths}
        problems = survey.problems + ([] if dry_run else _delete(store.root, leftovers, steps))
        gone = {path for path in statuses if dry_run or not os.path.lexists(path)}
    return Garbage(
        paths=tuple(sorted(path.relative_to(store.root).as_posix() for path in gone)),
        num_runs=len(gone.intersection(survey.old_runs)),
        num_objects=len(gone.intersection(survey.dead_objects)),
        size_bytes=_freed_bytes(status for path in gone for status in statuses[path]),
        quarantine={
            path.relative_to(store.root).as_posix(): sum(status.st_size for status in _statuses(path))
            for path in quarantine
            if path not in gone
        },
        problems=tuple(problems),
    )


class _Survey:
    """What no kept run needs; nothing is deleted here."""

    def __init__(self, store: Store, keep_runs: int) -> None:
        self._store = store
        self.problems: list[str] = []
        self.leftovers: list[Path] = []
        """What killed processes left: no reader sees it."""
        # Every key and digest that a kept record mentions, in whatever place: it keeps the very objects that it lists,
        # though the index may list others by now. So does a document of a form that is not known here.
        self._keys: set[str] = set()
        self._digests: set[str] = set()
        self._are_needs_known = True
        runs = list_runs(store)
        self.old_runs = [*self._find_old_runs(runs, keep_runs)]
        self._keep_what_is_no_run({run.folder for run in runs})
        self.old_sweeps = [*self._find_old_sweeps({run.id for run in runs} - {path.name for path in self.old_runs})]
        self.dead_entries = [*self._find_dead_entries()]
        self.dead_objects = [*self._find_dead_objects()]
        self.dead_scratch = [path for path in self._visible("scratch") if self._is_dead_scratch(path.name)]
        self.leftovers += [path for path in _children(store.root / "locks") if _LOCK.fullmatch(path.name)]
        self.leftovers += [path for path in _children(store.root) if _TEMPORARY.fullmatch(path.name)]
        if not self._are_needs_known:
            # Any result may be one that the file needs once it is restored, or a newer version reads it.
            self.dead_entries, self.dead_objects, self.dead_scratch = [], [], []
            self.problems.insert(
                0,
                "every stored result is kept, because it is unknown which of them these unreadable files need; restore"
                " them, or delete the run's folder or the index entry, and run gc again",
            )

    def _find_old_runs(self, runs: Iterable[Run], keep_runs: int) -> Iterator[Path]:
        seen: Counter[str] = Counter()
        for run in runs:
            try:
                record = read_record(run.folder)
            except PtpipeError as error:
                if _is_abandoned(run.folder):
                    self.leftovers.append(run.folder)
                else:
                    self._is_unreadable(str(error))
                continue
            seen[run.name] += 1
            if seen[run.name] > keep_runs:
                yield run.folder
            else:
                self._keys |= _mentioned(record)
                self.leftovers += _temporaries(run.folder, record)

    def _find_old_sweeps(self, kept_runs: Collection[str]) -> Iterator[Path]:
        """Yield the sweeps without any run that stays; a sweep itself keeps nothing."""
        for folder in self._visible("sweeps"):
            try:
                runs = {trial["run_id"] for trial in json.loads((folder / "sweep.json").read_bytes())["trials"]}
            except _UNREADABLE as error:
                self.problems.append(_describe(error, f"{folder} is kept: cannot read its sweep.json"))
                continue
            if runs.isdisjoint(kept_runs):
                yield folder

    def _keep_what_is_no_run(self, runs: Collection[Path]) -> None:
        for path in self._visible("runs"):
            if path in runs:
                continue
            self.problems.append(f"{path} is kept: it is not the folder of a run")
            try:
                self._keys |= _mentioned(read_document(path / "record.json"))
            except (FileNotFoundError, NotADirectoryError):
                pass
            except _UNREADABLE as error:
                self._is_unreadable(_describe(error, f"cannot read {path / 'record.json'}"))

    def _find_dead_entries(self) -> Iterator[Path]:
        self._digests |= self._keys
        for path in self._visible("index"):
            if path.suffix != ".json":
                continue
            try:
                document = read_document(path)
            except _UNREADABLE as error:
                self._is_unreadable(_describe(error, f"cannot read {path}"))
                continue
            entry = _known_entry(document, path.stem)
            if entry is None:
                self._digests |= _mentioned(document)
                self.problems.append(f"{path} is kept: another version of ptpipe wrote it, or for another key")
            elif entry.key in self._keys:
                self._digests |= {stored.digest for stored in entry.outputs.values()}
            else:
                yield path

    def _find_dead_objects(self) -> Iterator[Path]:
        for folder in self._visible("objects"):
            try:
                paths = _children(folder)
            except PtpipeError as error:
                self.problems.append(str(error))
                continue
            yield from (path for path in paths if _DIGEST.fullmatch(path.name) and path.name not in self._digests)

    def _is_dead_scratch(self, key: str) -> bool:
        is_needed = key in self._keys and self._store.entry(key) is None
        return _DIGEST.fullmatch(key) is not None and not is_needed  # a link may lead to a folder of other things

    def _visible(self, name: str) -> list[Path]:
        """Return what is in a folder of the store; what a killed process left there is put to the leftovers."""
        paths = _children(self._store.root / name)
        self.leftovers += [path for path in paths if _HALF.fullmatch(path.name)]
        return [path for path in paths if not path.name.startswith(".")]

    def _is_unreadable(self, problem: str) -> None:
        self._are_needs_known = False
        self.problems.append(problem)


def _children(folder: Path) -> list[Path]:
    """Return what is in a folder. Raises PtpipeError where it can't be listed."""
    try:
        return sorted(folder.iterdir(), key=lambda path: path.name)  # by name: comparing paths is slow
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PtpipeError(f"cannot read {folder}: {error.strerror or error}") from error


def _is_abandoned(folder: Path) -> bool:
    """Return whether a process was killed before it wrote anything to a run's folder."""
    try:
        return all(_HALF.fullmatch(path.name) for path in _children(folder))
    except PtpipeError:
        return False


def _temporaries(folder: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Yield what killed writes of the record and of deliverables left in a run's folder."""
    listed = {folder / name for stage in record["stages"] for name in stage["deliverables"]}
    for parent, folders, names in os.walk(folder):
        if parent == str(folder) and "files" in folders:
            folders.remove("files")  # a stage's own files, of whatever names
        paths = (Path(parent, name) for name in names if _TEMPORARY.fullmatch(name))
        yield from (path for path in paths if path not in listed)


def _mentioned(document: Mapping[str, Any]) -> set[str]:
    return set(_DIGEST.findall(json.dumps(document)))


def _known_entry(document: Mapping[str, Any], key: str) -> Entry | None:
    """Return a key's index entry; None if the document is another key's, or of a form that is not known here."""
    try:
        entry = Entry.from_json(document)
    except _UNREADABLE:
        return None
    return entry if entry.key == key else None


def _delete(root: Path, leftovers: Iterable[Path], steps: Iterable[Collection[Path]]) -> list[str]:
    """Delete what no reader sees, then step by step. After a step with a failure, what depends on it stays."""
    problems = [*_remove(leftovers)]
    for paths in steps:
        failures = [*_discard(root, paths)]
        problems += failures
        if failures:
            break
    return problems


def _discard(root: Path, paths: Collection[Path]) -> Iterator[str]:
    """Delete files, and folders by renaming them first; yield a line for each failure."""
    for parent, siblings in groupby(sorted(paths), key=lambda path: path.parent):
        area = root / parent.relative_to(root).parts[0]
        aside = []
        for path in siblings:
            try:
                if path.is_dir() and not path.is_symlink():
                    aside.append(path.rename(area / f".old-{path.name}"))
                else:
                    path.unlink()
            except OSError as error:
                yield _describe(error, f"cannot delete {path}")
        try:
            for folder in {parent, area}:  # a power cut must not undo the renaming and keep what follows
                sync(folder)
        except OSError as error:
            yield _describe(error, f"cannot flush {area}")
        else:
            yield from _remove(aside)


def _remove(paths: Iterable[Path]) -> Iterator[str]:
    """Delete files and folders; yield a line for each failure."""
    for path in paths:
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            yield _describe(error, f"cannot delete {path}")


def _describe(error: Exception, what: str) -> str:
    if isinstance(error, PtpipeError):
        return str(error)
    return f"{what}: {(error.strerror if isinstance(error, OSError) else None) or error}"


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file at or below a path, as far as it can be read."""
    is_folder = path.is_dir() and not path.is_symlink()
    below = (Path(parent, name) for parent, _, names in os.walk(path) for name in names)
    for file in below if is_folder else [path]:
        with contextlib.suppress(OSError):
            yield file.lstat()


def _freed_bytes(statuses: Iterable[os.stat_result]) -> int:
    statuses = list(statuses)
    num_dead_links = Counter((status.st_dev, status.st_ino) for status in statuses)
    freed = {
        (status.st_dev, status.st_ino): status.st_size
        for status in statuses
        if num_dead_links[status.st_dev, status.st_ino] >= status.st_nlink
    }
    return sum(freed.values())
