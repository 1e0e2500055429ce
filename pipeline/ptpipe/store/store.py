"""The store: artifacts by content, and the index from keys to them.

`objects/<2 digits>/<digest>/` holds `record.json` and `files/`; `index/<key>.json` names a stage's outputs; `runs/`
has a folder a run; `scratch/<key>/` is what an unfinished stage keeps; `quarantine/` holds what was found altered.
Everything is written beside its place, synced, and renamed into it: a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from typing import Any, TypeVar

from ptpipe.artifact import JSON, Artifact
from ptpipe.errors import IntegrityError, PtpipeError
from ptpipe.store.files import sync, write_atomically

A = TypeVar("A", bound=Artifact)


@dataclass(frozen=True)
class StoredObject:
    """An artifact in the store."""

    digest: str
    type: str
    size_bytes: int
    summary: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """What the index knows of a key: the outputs, and everything said while they were made."""

    key: str
    kind: str
    parts: Mapping[str, JSON]
    inputs: Mapping[str, tuple[str, ...]]
    """Port name to the digests of the objects that were read."""
    outputs: Mapping[str, StoredObject]
    metrics: Mapping[str, JSON]
    notices: tuple[str, ...]
    seconds: float
    made_at: str
    machine: str = ""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Entry:
        """Inverse of `dataclasses.asdict`."""
        outputs = {name: StoredObject(**stored) for name, stored in content["outputs"].items()}
        inputs = {port: tuple(digests) for port, digests in content["inputs"].items()}
        return cls(**{**content, "outputs": outputs, "inputs": inputs, "notices": tuple(content["notices"])})


class Store:
    """An artifacts folder. Nothing is written before `open_for_writing`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._verified: set[str] = set()

    def open_for_writing(self) -> None:
        """Make the folders and see that they can be written. Raises PtpipeError with the reason."""
        try:
            for name in ("objects", "index", "runs", "scratch", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root / "objects"):
                pass
        except OSError as error:
            raise PtpipeError(f"cannot write to the artifacts folder {self.root}: {error.strerror or error}") from error

    # Objects

    def put(self, artifact: Artifact) -> StoredObject:
        """Store a value under the digest of its content; storing it twice costs a comparison."""
        with self._staging() as folder:
            files = folder / "files"
            files.mkdir()
            artifact.save(files)
            listing = _listing(files)
            name = type(artifact).__name__
            digest = hashlib.sha256(json.dumps([name, listing], sort_keys=True).encode()).hexdigest()
            record = {
                "digest": digest,
                "type": name,
                "files": listing,
                "size_bytes": sum(facts["size_bytes"] for facts in listing.values()),
                "summary": artifact.summary(),
            }
            (folder / "record.json").write_text(_record_text(record), encoding="utf-8")
            _seal(folder)
            self._adopt(folder, digest)
        self._verified.add(digest)
        return StoredObject(digest, name, record["size_bytes"], record["summary"])

    def get(self, digest: str, type_: type[A]) -> A:
        """Read a value back, its bytes verified. Raises IntegrityError where they are not those written."""
        self.verify(digest)
        return type_.load(self._object(digest) / "files")

    def has(self, digest: str) -> bool:
        """Whether the object is there; its bytes are not looked at."""
        return (self._object(digest) / "record.json").is_file()

    def verify(self, digest: str) -> None:
        """Compare an object's files with their digests, once a process. Raises IntegrityError."""
        if digest in self._verified:
            return
        folder = self._object(digest)
        try:
            record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
            listing = _listing(folder / "files")
            found = hashlib.sha256(json.dumps([record["type"], listing], sort_keys=True).encode()).hexdigest()
            written = dict(record["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"object {digest[:12]} cannot be read: {error}") from error
        if found != digest:
            changed = sorted(name for name in {*listing, *written} if listing.get(name) != written.get(name))
            raise IntegrityError(f"object {digest[:12]} was altered: {', '.join(changed) or 'its record'}")
        self._verified.add(digest)

    def quarantine(self, digest: str) -> Path:
        """Take an object out of the way, for a person to look at. Returns where it went."""
        folder = self.root / "quarantine"
        folder.mkdir(exist_ok=True)
        place = folder / f"{digest[:12]}-{time.time_ns()}"
        with contextlib.suppress(FileNotFoundError):
            self._object(digest).rename(place)
        return place

    def _object(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / digest

    def _adopt(self, folder: Path, digest: str) -> None:
        place = self._object(digest)
        if not place.parent.exists():
            place.parent.mkdir(exist_ok=True)
            sync(place.parent.parent)
        try:
            folder.rename(place)
        except OSError:
            try:
                self.verify(digest)  # the same content is there already
            except IntegrityError:
                self.quarantine(digest)
                folder.rename(place)
        sync(place.parent)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        # Not tempfile, whose folders are closed to everybody else: a team may share a store.
        folder = self.root / "objects" / f".new-{secrets.token_hex(8)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # The index

    def entry(self, key: str) -> Entry | None:
        """What is known of a key; None where it is unknown or an output has gone. A damaged entry is unknown."""
        path = self.root / "index" / f"{key}.json"
        try:
            entry = Entry.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        intact = entry.key == key and all(self.has(stored.digest) for stored in entry.outputs.values())
        return entry if intact else None

    def put_entry(self, entry: Entry) -> None:
        """Record a finished stage."""
        path = self.root / "index" / f"{entry.key}.json"
        write_atomically(path, json.dumps(asdict(entry), indent=1).encode())

    # What is kept for a while

    def scratch(self, key: str) -> Path:
        """The folder that an unfinished stage keeps its checkpoints in."""
        folder = self.root / "scratch" / key
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def drop_scratch(self, key: str) -> None:
        """Delete it: the stage is done."""
        shutil.rmtree(self.root / "scratch" / key, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, key: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold a key against other processes. The kernel lets go when the holder ends, however it ends."""
        with (self.root / "locks" / key).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep `collect_garbage` away while a run works here."""
        with (self.root / "locks" / "in-use").open("a+") as file:  # NFS: a shared lock needs reading
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep runs out. Raises PtpipeError where one is going on, or where there is no store."""
        if not (self.root / "locks").is_dir():
            raise PtpipeError(f"there is no artifacts folder at {self.root}")
        with (self.root / "locks" / "in-use").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PtpipeError(f"a run is using {self.root}; try again when it has ended") from error
            yield

    def source_cache(self) -> Path:
        """Where digests of source files are remembered."""
        return self.root / "index" / "sources.cache"


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    """Each file below a folder, with size and SHA-256. Anything but plain files and folders raises ValueError."""
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


def _record_text(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, indent=1)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the summary of {record['type']} is not JSON: {error}") from error


def _seal(folder: Path) -> None:
    """Make the files safe from a power cut, and from being written to by accident."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent) / name
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
            sync(path)
        sync(Path(parent))
