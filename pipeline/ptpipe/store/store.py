"""Content-addressed storage of artifacts, and the index from stage keys to them.

`objects/<2 digits>/<digest>/` holds `record.json` and `files/`; `index/<key>.json` names a stage's outputs; `runs/`
has one folder per run; `scratch/<key>/` holds the checkpoints of an unfinished stage; `quarantine/` holds objects that
failed verification. Everything is written beside its place, fsynced, and renamed into it: a reader sees all or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ptpipe.artifact import JSON, Artifact
from ptpipe.errors import IntegrityError, PtpipeError
from ptpipe.reads import ReadFile
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.files import GONE, errors_naming, make_folder, read_plain_file, sync, write_atomically
from ptpipe.store.format import FORMAT, read_format, write_format
from ptpipe.store.locks import LockedError, exclusive_lock, shared_lock
from ptpipe.store.object_files import Listing, Stamps, list_files, seal, stamp_files

A = TypeVar("A", bound=Artifact)


@dataclass(frozen=True)
class StoredObject:
    """An artifact in the store."""

    digest: str
    type: str
    size_bytes: int
    summary: Mapping[str, JSON] = field(default_factory=dict)

    def has_files(self, listing: Listing) -> bool:
        """Return whether its digest is that of its type and these files."""
        return self.digest == _digest(self.type, listing)


@dataclass(frozen=True)
class Entry:
    """An index entry: a finished stage's outputs, and the metrics and notices that it reported."""

    key: str
    kind: str
    parts: Mapping[str, JSON]
    inputs: Mapping[str, tuple[str, ...]]
    """Port name to the digests of the objects that the stage read."""
    outputs: Mapping[str, StoredObject]
    metrics: Mapping[str, JSON]
    notices: tuple[str, ...]
    seconds: float
    made_at: str
    environment: Mapping[str, JSON] = field(default_factory=dict)
    """Versions of ptpipe and Python, and the machine, that produced it."""
    machine: str = ""
    dependencies: Mapping[str, str] = field(default_factory=dict)
    """Modules that the stage imported besides the code in its key, by name (by path where it has no name to import it
    by), with the digests of their code: the result is current only while they are the same."""
    files: Mapping[str, ReadFile] = field(default_factory=dict)
    """Files that the stage read besides those of its key, by path: relative in the working directory, else absolute."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Entry:
        """Inverse of `dataclasses.asdict`. Raises ValueError for anything else."""
        try:
            outputs = {name: StoredObject(**stored) for name, stored in content["outputs"].items()}
            inputs = {port: tuple(digests) for port, digests in content["inputs"].items()}
            files = {path: ReadFile(*facts) for path, facts in content.get("files", {}).items()}
            read = {"outputs": outputs, "inputs": inputs, "files": files, "notices": tuple(content["notices"])}
            entry = cls(**{**content, **read})
            has_digests = all(re.fullmatch("[0-9a-f]{64}", stored.digest) for stored in outputs.values())
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no index entry of this version of ptpipe: {error!r}") from error
        if not (has_digests and all(isinstance(stored.summary, dict) for stored in outputs.values())):
            raise ValueError("no index entry: an output has no digest or no summary")
        return entry


class Store:
    """The artifacts folder `root`. Writes nothing before `open_for_writing`.

    In its methods, `digest` is that of a stored object (`StoredObject.digest`), and `key` that of a stage.

    Raises UsageError where a newer version of ptpipe wrote it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._format = read_format(self.root)
        self._verified: dict[str, Stamps] = {}

    def open_for_writing(self) -> str:
        """Create the folders and check that they are writable. Raises PtpipeError with the reason.

        Returns a notice about results of a former format, if there are any.
        """
        notice = ""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for name in ("objects", "index", "runs", "scratch", "locks"):
                make_folder(self.root / name)
            with tempfile.TemporaryFile(dir=self.root / "objects"):
                pass
            if self._format < FORMAT:
                if any((self.root / "index").glob("*.json")):
                    notice = f"{self.root} is of a former version: results without a digest are kept, but not used"
                with self.in_use():  # gc would delete the file that is being written
                    write_format(self.root)
                self._format = FORMAT
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, FileExistsError):
                reason = f"{error.filename} is not a folder"
            raise PtpipeError(f"cannot write to the artifacts folder {self.root}: {reason}") from error
        return notice

    # Objects

    def put(self, artifact: Artifact) -> StoredObject:
        """Save a value under the digest of its content. A value that is stored already is only compared."""
        with self._staging() as folder:
            files = folder / "files"
            make_folder(files)
            artifact.save(files)
            return self._commit(folder, type(artifact).__name__, list_files(files), artifact.summary())

    def adopt(self, source: Path, type_: type[Artifact]) -> StoredObject:
        """Store a folder that an artifact was saved to, by moving it (copying from another file system).

        The artifact is loaded for its summary only: its files are not written a second time. Raises ValueError where
        `source` is no folder, and whatever `type_.load` raises for files that are not of that type.
        """
        if source.is_symlink() or not source.is_dir():
            raise ValueError(f"{source} is not the folder of a saved {type_.__name__}")
        with self._staging() as folder:
            files = folder / "files"
            shutil.move(source, files)
            listing = list_files(files)  # first: it refuses links, which `load` would follow
            return self._commit(folder, type_.__name__, listing, type_.load(files).summary())

    def get(self, digest: str, type_: type[A]) -> A:
        """Load a value of class `type_`, its bytes verified. Raises IntegrityError where they are not those written."""
        self.verify(digest)
        with errors_naming(self.files(digest)):
            value: object = type_.load(self.files(digest))
        if isinstance(value, type_):
            return value
        raise TypeError(f"{type_.__name__}.load() returned a {type(value).__name__}")

    def files(self, digest: str) -> Path:
        """Return the read-only folder that the artifact was saved to; its bytes are not verified."""
        return self._object(digest) / "files"

    def has(self, digest: str) -> bool:
        """Return whether the object exists; its bytes are not verified. Raises OSError where it can't be accessed."""
        try:
            (self._object(digest) / "record.json").lstat()
        except GONE:
            return False
        return True

    def require(self, digest: str) -> None:
        """Raise IntegrityError where the object is missing, OSError where it can't be accessed."""
        if self._object(digest).is_symlink():
            raise IntegrityError(f"object {digest[:12]} was altered: a link is in its place")
        if not self.has(digest):
            raise IntegrityError(f"object {digest[:12]} is missing, or its record")

    def listing(self, digest: str) -> Listing:
        """Return the size and SHA-256 of an object's files as written. Raises as `verify` does."""
        self.require(digest)
        try:
            record = json.loads(read_plain_file(self._object(digest) / "record.json"))
            record.pop("summary", None)  # former versions wrote it here too
            listing = dict(record["files"])
            is_intact = record == _record(record["type"], listing) and record["digest"] == digest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"object {digest[:12]} cannot be read: {error}") from error
        if not is_intact:
            raise IntegrityError(f"object {digest[:12]} was altered: its record")
        return listing

    def verify(self, digest: str) -> None:
        """Compare an object's files with their digests, once per process unless they were written to since.

        Raises IntegrityError where a file is missing or differs, or a link is in its place. Raises OSError where a file
        can't be read (EIO, EACCES, ESTALE): that says nothing about its bytes, so the object must stay where it is.
        """
        self.require(digest)
        files = self.files(digest)
        if files.is_symlink():
            raise IntegrityError(f"object {digest[:12]} was altered: its folder of files is a link")
        try:
            stamps = stamp_files(files)
            if self._verified.get(digest) == stamps:
                return
            written, found = self.listing(digest), list_files(files)
        except (*GONE, ValueError) as error:
            raise IntegrityError(f"object {digest[:12]} was altered: {error}") from error
        if changed := sorted(name for name in {*found, *written} if found.get(name) != written.get(name)):
            raise IntegrityError(f"object {digest[:12]} was altered: {', '.join(changed)}")
        self._verified[digest] = stamps

    def quarantine(self, digest: str) -> Path | None:
        """Move an object aside for inspection. Returns its new place, None where there is no such object."""
        return self._set_aside(self._object(digest))

    def _set_aside(self, path: Path) -> Path | None:
        folder = self.root / "quarantine"
        make_folder(folder)
        try:
            return path.rename(folder / f"{path.stem[:12]}-{time.time_ns()}{path.suffix}")
        except GONE:
            return None

    def _object(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / digest

    def _commit(self, folder: Path, type_name: str, listing: Listing, summary: Mapping[str, JSON]) -> StoredObject:
        """Turn a staging folder with `files/` into an object."""
        _require_json(type_name, summary)
        record = _record(type_name, listing)
        (folder / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        seal(folder)
        self._publish(folder, record["digest"])
        self._verified[record["digest"]] = stamp_files(self.files(record["digest"]))
        return StoredObject(record["digest"], type_name, record["size_bytes"], summary)

    def _publish(self, folder: Path, digest: str) -> None:
        place = self._object(digest)
        if not place.parent.exists():
            make_folder(place.parent)
            sync(place.parent.parent)
        try:
            folder.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            try:
                self.verify(digest)  # an object with this content exists already
            except IntegrityError:
                self.quarantine(digest)
                folder.rename(place)
        sync(place.parent)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        # Not tempfile, whose folders are closed to all other users: a team may share a store.
        folder = self.root / "objects" / f".new-{secrets.token_hex(8)}"
        make_folder(folder)
        try:
            with errors_naming(folder):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # The index

    def read_entry(self, key: str) -> Entry | None:
        """Return a key's entry; None where there is none.

        Raises IntegrityError where it was altered, OSError where it can't be read. Its objects are not looked at.
        """
        path = self._entry_path(key)
        try:
            entry = Entry.from_json(read_document(path))
        except GONE:
            return None
        except ValueError as error:
            raise IntegrityError(f"{path}: {error}") from error
        if entry.key != key:
            raise IntegrityError(f"{path} was altered: it is the entry of another key")
        return entry

    def entry(self, key: str) -> Entry | None:
        """Return a key's entry; None where there is none, it can't be read, or one of its outputs is missing."""
        try:
            entry = self.read_entry(key)
            return entry if entry and all(self.has(stored.digest) for stored in entry.outputs.values()) else None
        except (IntegrityError, OSError):
            return None

    def put_entry(self, entry: Entry) -> None:
        """Record a finished stage."""
        path = self._entry_path(entry.key)
        if path.is_dir() and not path.is_symlink():  # which no file can replace
            self.quarantine_entry(entry.key)
        write_document(path, json.dumps(asdict(entry), indent=1))

    def quarantine_entry(self, key: str) -> Path | None:
        """Move an entry aside for inspection. Returns its new place, None where there is none."""
        return self._set_aside(self._entry_path(key))

    def _entry_path(self, key: str) -> Path:
        return self.root / "index" / f"{key}.json"

    # Scratch folders and locks

    def scratch(self, key: str) -> Path:
        """Return the folder for an unfinished stage's checkpoints, created if missing."""
        folder = self.root / "scratch" / key
        make_folder(folder)
        return folder

    def claim_scratch(self, key: str, origin: str) -> None:
        """Delete checkpoints of an execution whose inputs had another origin; the key must be locked.

        `origin`: a digest of what the inputs depend on besides their content, such as code that is executed again when
        they are loaded; empty where there is none.
        """
        mark = self.root / "scratch" / key / ".origin"
        try:
            found = mark.read_text(encoding="utf-8")
        except FileNotFoundError:
            found = ""
        if found != origin:
            self.drop_scratch(key)
        if origin:
            write_atomically(self.scratch(key) / mark.name, origin.encode())

    def drop_scratch(self, key: str) -> None:
        """Delete a finished stage's scratch folder; the key must be locked."""
        shutil.rmtree(self.root / "scratch" / key, ignore_errors=True)

    def drop_leftover_scratch(self, key: str) -> None:
        """Delete the scratch folder that a killed run left of a stage that it had finished, if no run uses it."""
        if (self.root / "scratch" / key).exists():
            with contextlib.suppress(OSError, PtpipeError), exclusive_lock(self.root / "locks" / key):
                self.drop_scratch(key)

    def lock(self, key: str, on_wait: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """Lock a key against other processes inside the `with`; `on_wait` is called before waiting."""
        return exclusive_lock(self.root / "locks" / key, on_wait)

    def in_use(self, on_wait: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """Keep `collect_garbage` out while a run uses the store inside the `with`; `on_wait` as in `lock`."""
        return shared_lock(self.root / "locks" / "in-use", on_wait)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep runs out inside the `with`. Raises PtpipeError where one is active, or where there is no store."""
        if not (self.root / "locks").is_dir():
            raise PtpipeError(f"there is no artifacts folder at {self.root}")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(exclusive_lock(self.root / "locks" / "in-use"))
            except LockedError as error:
                raise PtpipeError(f"a run is using {self.root}; try again when it has ended") from error
            yield

    def source_cache(self) -> Path:
        """Return the file that caches digests of plugins' source files."""
        return self.root / "index" / "sources.cache"


def _digest(type_name: str, listing: Listing) -> str:
    return hashlib.sha256(json.dumps([type_name, listing], sort_keys=True).encode()).hexdigest()


def _record(type_name: str, listing: Listing) -> dict[str, Any]:
    """Return an object's record: nothing that its digest does not decide, so that each changed byte is noticed."""
    size_bytes = sum(facts["size_bytes"] for facts in listing.values())
    return {"digest": _digest(type_name, listing), "type": type_name, "files": listing, "size_bytes": size_bytes}


def _require_json(type_name: str, summary: object) -> None:
    if not isinstance(summary, dict):
        raise TypeError(f"the summary of {type_name} is a {type(summary).__name__}, not a dict")
    try:
        json.dumps(summary)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the summary of {type_name} is not JSON: {error}") from error
