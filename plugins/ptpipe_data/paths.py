"""Paths in manifests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ptpipe import StageError


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


def split_folders(root: Path) -> dict[str, str]:
    """Return the folder of each split, relative to `root`: the root itself is train's where none is called train."""
    if not (root / "train").is_dir():
        return {"train": ""}
    return {name: name for name in ("train", "val", "test") if (root / name).is_dir()}


def change_stamp(name: str, status: os.stat_result) -> bytes:
    """Return what tells whether a file has changed, for a digest: its name, its size and its times of change.

    Both times: the modification time can be set, to hide a change (`touch -r`), the time of the last change to the file
    cannot. So a copy, a rename or another owner is a change too.
    """
    stamp = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n"
    return stamp.encode(errors="surrogateescape")


def id_prefixes(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return what ids of each path's samples begin with: its name, or all of it where names alone are the same."""
    names = [path.name for path in paths.values()]
    return {key: str(path) if names.count(path.name) > 1 else path.name for key, path in paths.items()}
