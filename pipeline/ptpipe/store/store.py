"""Content-addressed storage of artifacts, and the index from stage keys to them.

`objects/<2 digits>/<digest>/` holds `record.json` and `files/`; `index/<key>.json` names a stage's outputs; `runs/`
has one folder per run; `scratch/<key>/` holds the checkpoints of an unfinished stage; `quarantine/` holds objects that
failed verification. Everything is written beside its place, fsynced, and renamed into it: a reader sees all or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ptpipe.artifact import JSON, Artifact
from ptpipe.errors import IntegrityError, PtpipeError
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.files import sync
from ptpipe.store.locks import LockedError, exclusive_lock, shared_lock

A = TypeVar("A", bound=Artifact)

Listing: TypeAlias = dict[str, dict[str, Any]]
"""File name to `{"size_bytes": int, "sha256": str}`."""


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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Entry:
        """Inverse of `dataclasses.asdict`."""
        outputs = {name: StoredObject(**stored) for name, stored in content["outputs"].items()}
        inputs = {port: tuple(digests) for port, digests in content["inputs"].items()}
        return cls(**{**content, "outputs": outputs, "inputs": inputs, "notices": tuple(content["notices"])})


class Store:
    """An artifacts folder. Writes nothing before `open_for_writing`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._verified: set[str] = set()

    def open_for_writing(self) -> None:
        """Create the folders and check that they are writable. Raises PtpipeError with the reason."""
        try:
            for name in ("objects", "index", "runs", "scratch", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root / "objects"):
                pass
        except OSError as error:
            raise PtpipeError(f"cannot write to the artifacts folder {self.root}: {error.strerror or error}") from error

    # Objects

    def put(self, artifact: Artifact) -> StoredObject:
        """Save a value under the digest of its content. A value that is stored already is only compared."""
        with self._staging() as folder:
            files = folder / "files"
            files.mkdir()
            artifact.save(files)
            return self._commit(folder, type(artifact).__name__, _listing(files), artifact.summary())

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
            listing = _listing(files)  # first: it refuses links, which `load` would follow
            return self._commit(folder, type_.__name__, listing, type_.load(files).summary())

    def get(self, digest: str, type_: type[A]) -> A:
        """Load a value, its bytes verified. Raises IntegrityError where they are not those written."""
        self.verify(digest)
        return type_.load(self.files(digest))

    def files(self, digest: str) -> Path:
        """Return the read-only folder that the artifact was saved to; its bytes are not verified."""
        return self._object(digest) / "files"

    def has(self, digest: str) -> bool:
        """Return whether the object exists; its bytes are not verified."""
        return (self._object(digest) / "record.json").is_file()

    def listing(self, digest: str) -> Listing:
        """Return the size and SHA-256 of an object's files as written. Raises IntegrityError if its record changed."""
        try:
            record = json.loads((self._object(digest) / "record.json").read_text(encoding="utf-8"))
            listing, is_intact = dict(record["files"]), _digest(record["type"], record["files"]) == digest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"object {digest[:12]} cannot be read: {error}") from error
        if not is_intact:
            raise IntegrityError(f"object {digest[:12]} was altered: its record")
        return listing

    def verify(self, digest: str) -> None:
        """Compare an object's files with their digests, once per process. Raises IntegrityError."""
        if digest in self._verified:
            return
        written = self.listing(digest)
        try:
            found = _listing(self.files(digest))
        except (OSError, ValueError) as error:
            raise IntegrityError(f"object {digest[:12]} cannot be read: {error}") from error
        if changed := sorted(name for name in {*found, *written} if found.get(name) != written.get(name)):
            raise IntegrityError(f"object {digest[:12]} was altered: {', '.join(changed)}")
        self._verified.add(digest)

    def quarantine(self, digest: str) -> Path:
        """Move an object aside for inspection. Returns its new place."""
        folder = self.root / "quarantine"
        folder.mkdir(exist_ok=True)
        place = folder / f"{digest[:12]}-{time.time_ns()}"
        with contextlib.suppress(FileNotFoundError):
            self._object(digest).rename(place)
        return place

    def _object(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / digest

    def _commit(self, folder: Path, type_name: str, listing: Listing, summary: Mapping[str, JSON]) -> StoredObject:
        """Turn a staging folder with `files/` into an object."""
        digest = _digest(type_name, listing)
        size_bytes = sum(facts["size_bytes"] for facts in listing.values())
        record = {
            "digest": digest,
            "type": type_name,
            "files": listing,
            "size_bytes": size_bytes,
            "summary": summary,
        }
        (folder / "record.json").write_text(_record_text(record), encoding="utf-8")
        _seal(folder)
        self._publish(folder, digest)
        self._verified.add(digest)
        return StoredObject(digest, type_name, size_bytes, summary)

    def _publish(self, folder: Path, digest: str) -> None:
        place = self._object(digest)
        if not place.parent.exists():
            place.parent.mkdir(exist_ok=True)
            sync(place.parent.parent)
        try:
            folder.rename(place)
        except OSError:
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
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # The index

    def entry(self, key: str) -> Entry | None:
        """Return a key's entry; None where there is none, it is damaged, or one of its outputs is missing."""
        path = self.root / "index" / f"{key}.json"
        try:
            entry = Entry.from_json(read_document(path))
        except (IntegrityError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        intact = entry.key == key and all(self.has(stored.digest) for stored in entry.outputs.values())
        return entry if intact else None

    def put_entry(self, entry: Entry) -> None:
        """Record a finished stage."""
        path = self.root / "index" / f"{entry.key}.json"
        write_document(path, json.dumps(asdict(entry), indent=1))

    # Scratch folders and locks

    def scratch(self, key: str) -> Path:
        """Return the folder for an unfinished stage's checkpoints, created if missing."""
        folder = self.root / "scratch" / key
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def drop_scratch(self, key: str) -> None:
        """Delete a finished stage's scratch folder."""
        shutil.rmtree(self.root / "scratch" / key, ignore_errors=True)

    def lock(self, key: str, on_wait: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """Lock a key against other processes inside the `with`; `on_wait` is called before waiting."""
        return exclusive_lock(self.root / "locks" / key, on_wait)

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Keep `collect_garbage` out while a run uses the store inside the `with`."""
        return shared_lock(self.root / "locks" / "in-use")

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


def _listing(folder: Path) -> Listing:
    """Return the size and SHA-256 of each file below a folder. Raises ValueError for links, pipes and the like."""
    listing = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"an artifact is plain files and folders, and {name} is neither")
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            listing[name] = {"size_bytes": path.stat().st_size, "sha256": digest}
    return listing


def _digest(type_name: str, listing: Listing) -> str:
    return hashlib.sha256(json.dumps([type_name, listing], sort_keys=True).encode()).hexdigest()


def _record_text(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, indent=1)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the summary of {record['type']} is not JSON: {error}") from error


def _seal(folder: Path) -> None:
    """Flush the files to the disk, and make them read-only against accidents."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent) / name
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
            sync(path)
        sync(Path(parent))
