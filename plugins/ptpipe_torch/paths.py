"""Paths in manifests: where they are searched, and what tells that files there have changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ptpipe import JSON, StageError
from ptpipe_torch.files import open_regular


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
        digests[path] = _folder_digest(found) if found.is_dir() else _file_digest(found)
    return digests or None


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            status = os.lstat(os.path.join(root, name))  # noqa: PTH118  # a Path per file is slow
            relative = os.path.relpath(os.path.join(root, name), folder)  # noqa: PTH118
            digest.update(change_stamp(relative, status))
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
