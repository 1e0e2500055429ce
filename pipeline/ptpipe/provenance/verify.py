"""Verify stored results, runs and deliverables against their digests. Only reads."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ptpipe.errors import IntegrityError
from ptpipe.execution.statement import statement_path
from ptpipe.provenance.envelope import check_envelope, deliverable_of, envelope_path
from ptpipe.provenance.statement import Statement, is_key_of
from ptpipe.store.documents import read_document
from ptpipe.store.runs import find_run
from ptpipe.store.store import Entry, Store

_SHARD = re.compile(r"[0-9a-f]{2}")
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class State(StrEnum):
    """What is wrong with something stored."""

    ALTERED = "altered"
    MISSING = "missing"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Fault:
    """Something that is not what was written."""

    state: State
    subject: str
    """A path relative to the artifacts folder where it is inside; absolute elsewhere."""
    detail: str


class Verification:
    """Verifies parts of a store, and collects what is wrong; everything is read once.

    `key`: the public key that every deliverable's statement must be signed with; None if none needs to be.
    """

    def __init__(self, store: Store, key: Path | None = None) -> None:
        self.store, self.key = store, key
        self.faults: list[Fault] = []
        self.checked: Counter[str] = Counter()
        """How many there were of each sort: run, result, object, deliverable, signature, unverified_signature, byte."""
        self._entries: set[str] = set()
        self._objects: dict[str, bool] = {}

    def verify_store(self) -> None:
        """Verify every index entry, object and run."""
        root = self.store.root
        with self._gc_excluded():
            for path in _listed(root / "index"):
                if path.suffix == ".json":
                    self._entry(path.stem)
            for folder in _listed(root / "objects"):
                if _SHARD.fullmatch(folder.name) and folder.is_dir():
                    for path in _listed(folder):
                        self._object(path.name)
            for folder in _runs(self.store):
                self._run(folder)

    def verify_run(self, wanted: str) -> None:
        """Verify a run's record, manifest, results and deliverables. Raises UsageError where there is no such run."""
        folder = _run_folder(self.store, wanted)
        with self._gc_excluded():
            self._run(folder)

    def verify_file(self, path: Path) -> None:
        """Verify a deliverable (or that of a statement or an envelope), in the store or elsewhere, by its statement.

        What the store has of the stages that led to the deliverable is verified too.
        """
        path = deliverable_of(path).resolve()
        statement = self._deliverable(path)
        if statement is None or not (self.store.root / "objects").is_dir():
            return
        with self._gc_excluded():
            self._statement_in_store(path, statement)

    def _statement_in_store(self, path: Path, statement: Statement) -> None:
        run = self.store.root / "runs" / Path(statement.run_id).name
        kept = statement_path(run / statement.stage / path.name)
        with self._collected(statement_path(path)):
            if kept.is_file() and kept.read_bytes() != statement_path(path).read_bytes():
                raise IntegrityError(f"it is not the statement of that run, {self._name(kept)}")
        for result in statement.results:
            for output in result.outputs.values():
                if output.digest not in self._objects and self.store.files(output.digest).parent.exists():
                    self._object(output.digest)

    def _run(self, folder: Path) -> None:
        self.checked["run"] += 1
        with self._collected(folder / "record.json"):
            record = read_document(folder / "record.json")
            _check_record(record)
            self._manifest(folder, record["manifest_sha256"])
            for stage in record["stages"]:
                self._stage(folder, stage)

    def _manifest(self, folder: Path, sha256: str) -> None:
        with self._collected(folder / "manifest.yaml"):
            if self._sha256(folder / "manifest.yaml") != sha256:
                raise IntegrityError("it is not the manifest that the run's record names")

    def _stage(self, folder: Path, stage: Mapping[str, Any]) -> None:
        if stage["outputs"]:
            self._entry(stage["key"])
        for output in stage["outputs"].values():
            self._object(output["digest"])
        for name in stage["deliverables"]:
            statement = self._deliverable(folder / name)
            if statement is None:
                continue
            made = {output: facts["digest"] for output, facts in stage["outputs"].items()}
            named = (statement.run_id, statement.stage, statement.results[-1].outputs[statement.output].digest)
            with self._collected(statement_path(folder / name)):
                if named != (folder.name, stage["stage_id"], made.get(statement.output)):
                    raise IntegrityError("it is the statement of another run or stage")

    def _deliverable(self, path: Path) -> Statement | None:
        """Compare a deliverable with its statement; return that where it is usable."""
        self.checked["deliverable"] += 1
        statement = None
        with self._collected(statement_path(path)):
            statement = Statement.read(statement_path(path))
            with self._collected(envelope_path(path)):
                is_signed = check_envelope(path, self.key)
                self.checked["signature" if self.key else "unverified_signature"] += is_signed
        with self._collected(path):
            _require_plain(path)
            if statement and not self._is_verified_link(path, statement) and self._sha256(path) != statement.sha256:
                raise IntegrityError("its bytes are not those of its statement")
        return statement

    def _is_verified_link(self, path: Path, statement: Statement) -> bool:
        """Return whether a file is a hard link to that of an intact object, whose bytes are read only once."""
        digest = statement.results[-1].outputs[statement.output].digest
        stored = self.store.files(digest) / statement.file
        return stored.is_file() and stored.samefile(path) and self._object(digest)

    def _entry(self, key: str) -> None:
        if key in self._entries:
            return
        self._entries.add(key)
        self.checked["result"] += 1
        path = self.store.root / "index" / f"{key}.json"
        with self._collected(path):
            try:
                entry = Entry.from_json(read_document(path))
                is_sound = entry.key == key and is_key_of(key, entry.parts)
            except _MALFORMED as error:
                raise IntegrityError(f"it is no result of this version of ptpipe: {error}") from error
            if not is_sound:
                raise IntegrityError("its key is not that of its parts")
            for stored in entry.outputs.values():
                self._object(stored.digest)

    def _object(self, digest: str) -> bool:
        """Verify an object's bytes, once. Returns whether it is intact."""
        if digest in self._objects:
            return self._objects[digest]
        self._objects[digest] = False
        self.checked["object"] += 1
        folder = self.store.files(digest).parent
        with self._collected(folder):
            if not folder.is_dir():
                raise FileNotFoundError("a result or a run names it")
            if folder.is_symlink():
                raise IntegrityError("it is a link")
            _require_plain(folder / "record.json")
            self.store.verify(digest)
            self.checked["byte"] += sum(file["size_bytes"] for file in self.store.listing(digest).values())
            self._objects[digest] = True
        return self._objects[digest]

    def _sha256(self, path: Path) -> str:
        _require_plain(path)
        with path.open("rb") as file:
            self.checked["byte"] += os.fstat(file.fileno()).st_size
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.store.root) if path.is_relative_to(self.store.root) else path)

    @contextlib.contextmanager
    def _collected(self, path: Path) -> Iterator[None]:
        """Turn what the inner block finds wrong with a file or folder into a fault, and continue."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            self.faults.append(Fault(State.MISSING, self._name(path), error.strerror or str(error)))
        except IntegrityError as error:
            self.faults.append(Fault(State.ALTERED, self._name(path), str(error)))
        except OSError as error:
            self.faults.append(Fault(State.UNREADABLE, self._name(path), error.strerror or str(error)))

    @contextlib.contextmanager
    def _gc_excluded(self) -> Iterator[None]:
        """Keep `ptpipe gc` from deleting meanwhile, where this user may lock the store."""
        lock = self.store.root / "locks" / "in-use"
        with self.store.in_use() if os.access(lock, os.W_OK) else contextlib.nullcontext():
            yield


def _require_plain(path: Path) -> None:
    """Raise IntegrityError for a link, pipe or folder in place of a file: opening a pipe would wait for ever."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise IntegrityError("it is no plain file")


def _check_record(record: Mapping[str, Any]) -> None:
    """Raise IntegrityError where a run's record is not of this version, or names keys that are not of their parts."""
    try:
        for stage in record["stages"]:
            key = stage["key"]
            if key != record["keys"][stage["stage_id"]] or not is_key_of(key, stage["parts"]):
                raise IntegrityError(f"the key of {stage['stage_id']!r} is not that of its parts")
            names = [output["digest"] for output in stage["outputs"].values()] + stage["deliverables"]
            if not all(isinstance(name, str) and ".." not in Path(name).parts for name in names):
                raise IntegrityError(f"the outputs of {stage['stage_id']!r} have strange names")
        str(record["manifest_sha256"])
    except _MALFORMED as error:
        raise IntegrityError(f"it is no record of this version of ptpipe: {error!r}") from error


def _run_folder(store: Store, wanted: str) -> Path:
    """Return the folder of a run by its id, the start or end of one, or `last`, also if its record is damaged."""
    folders = {path.name: path for path in _runs(store)}
    matching = [name for name in folders if name.startswith(wanted) or name.endswith(wanted)]
    if wanted in folders or len(matching) == 1:
        return folders[wanted if wanted in folders else matching[0]]
    newest = max(folders.values(), default=None)
    if wanted == "last" and newest is not None:
        try:
            read_document(newest / "record.json")
        except (IntegrityError, OSError):
            return newest  # `find_run` would pass over it
    return find_run(store, wanted)[1]


def _runs(store: Store) -> list[Path]:
    """Return the folders of runs, but for those killed before they wrote a record: nothing is left to verify."""
    return [path for path in _listed(store.root / "runs") if not path.is_dir() or _has_begun(path)]


def _listed(folder: Path) -> list[Path]:
    """Return what a folder shows, none if it is missing. Unlike `glob`, raises OSError where it can't be read."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []


def _has_begun(folder: Path) -> bool:
    return any(path.name != "manifest.yaml" and not path.name.startswith(".") for path in folder.iterdir())
