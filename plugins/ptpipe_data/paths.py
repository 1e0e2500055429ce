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


def id_prefixes(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return what ids of each path's samples begin with: its name, or all of it where names alone are the same."""
    names = [path.name for path in paths.values()]
    return {key: str(path) if names.count(path.name) > 1 else path.name for key, path in paths.items()}
