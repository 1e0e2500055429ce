"""The files of a stored object: list them with their digests, make them read-only."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ptpipe.store.files import errors_naming, sync

Listing: TypeAlias = dict[str, dict[str, Any]]
"""File name to `{"size_bytes": int, "sha256": str}`."""

Stamps: TypeAlias = list[tuple[str, int, int, int]]
"""Name, inode, size in bytes, and time of the last change in ns of each file."""


def list_files(folder: Path) -> Listing:
    """Return the size and SHA-256 of each file below a folder.

    Raises ValueError for links, pipes and the like, OSError for what cannot be read.
    """
    listing = {}
    for name, path in _walk(folder):
        with errors_naming(path), path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            listing[name] = {"size_bytes": os.fstat(file.fileno()).st_size, "sha256": digest}
    return listing


def stamp_files(folder: Path) -> Stamps:
    """Return what tells that a file below a folder was written to, without reading it. Raises as `list_files` does."""
    # Not the time of the last status change: a hard link to a deliverable changes it.
    statuses = ((name, path.lstat()) for name, path in _walk(folder))
    return [(name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in statuses]


def _walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    with os.scandir(folder) as items:  # not Path.rglob, which takes an unreadable folder for an empty one
        for item in sorted(items, key=lambda item: item.name):
            name = prefix + item.name
            if item.is_dir(follow_symlinks=False):
                yield from _walk(folder / item.name, f"{name}/")
            elif item.is_file(follow_symlinks=False):
                yield name, folder / item.name
            else:
                raise ValueError(f"an artifact is plain files and folders, and {name} is neither")


def seal(folder: Path) -> None:
    """Flush the files to the disk, and make them read-only against accidents."""
    for parent, _, names in os.walk(folder, topdown=False, onerror=_raise):
        for name in names:
            path = Path(parent) / name
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
            sync(path)
        sync(Path(parent))


def _raise(error: OSError) -> None:
    raise error  # os.walk passes over a folder that it can't read
