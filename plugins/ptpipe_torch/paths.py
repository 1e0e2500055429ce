"""Paths in manifests: where they are searched, and what tells that files there have changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISDIR
from typing import TypeAlias

from ptpipe import JSON, StageError
from ptpipe_torch.files import file_digest

_Files: TypeAlias = Iterator[tuple[str, os.stat_result]]


def find_path(path: str) -> Path:
    """Return an existing path as an absolute one: relative to the working directory, else to $PTPIPE_DATA.

    Raises StageError, with the places that were searched, where there is none.
    """
    given = Path(path).expanduser()
    data = os.environ.get("PTPIPE_DATA")
    candidates = [given.absolute(), *([(Path(data) / given).absolute()] if data else [])]
    for candidate in dict.fromkeys(candidates):
        if candidate.exists():
            return candidate
    searched = " and ".join(map(str, dict.fromkeys(candidates)))
    hint = "" if data or given.is_absolute() else " ($PTPIPE_DATA, where relative paths are also searched, is not set)"
    raise StageError(f"{searched} {'does' if len(set(candidates)) == 1 else 'do'} not exist{hint}")


def change_stamp(name: str, status: os.stat_result) -> bytes:
    """Return what tells whether a file has changed, for a digest: its name, its size and its times of change.

    Both times: the modification time can be set, to hide a change (`touch -r`), the time of the last change to the file
    cannot. So a copy, a rename or another owner is a change too.
    """
    stamp = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n"
    return stamp.encode(errors="surrogateescape")


def read_digests(paths: Iterable[str]) -> JSON:
    """Return the digest of each file, and of the names, sizes and times of change of what is in each folder.

    None without any path. Raises StageError where one does not exist.
    """
    digests: dict[str, JSON] = {}
    for path in paths:
        found = find_path(path)
        digests[path] = _folder_digest(found) if found.is_dir() else file_digest(found)
    return digests or None


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for relative, status in _files(str(folder)):
        digest.update(change_stamp(relative, status))
    return digest.hexdigest()


def _files(folder: str, relative: str = "", above: frozenset[tuple[int, int]] = frozenset()) -> _Files:
    """Yield relative path and status of each file below a folder, sorted by name; links are followed, as readers do.

    `above`: device and number of the folders around it: a link to one of these would lead around in circles.
    """
    try:
        own = os.stat(folder)  # noqa: PTH116  # a Path per file is slow
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:  # the function can't read it either
        return
    identity = own.st_dev, own.st_ino
    for entry in found if identity not in above else ():
        path, status = f"{relative}{entry.name}", _status(entry)
        if S_ISDIR(status.st_mode):
            yield from _files(entry.path, f"{path}/", above | {identity})
        else:
            yield path, status


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError:  # a link to nothing, or to itself
        return entry.stat(follow_symlinks=False)
