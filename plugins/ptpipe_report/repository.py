"""Paths as CI services know them: relative to the root of the repository."""

from __future__ import annotations

import os
from pathlib import Path


def path_in_repository(path: str) -> str:
    """Return a file's path relative to the root of its repository, with `/`; absolute where it is in none.

    The root is the nearest folder above with `.git`, else `$GITHUB_WORKSPACE`, else the working directory.
    """
    absolute = Path(path).absolute()
    return next(
        (absolute.relative_to(root).as_posix() for root in _roots(absolute) if absolute.is_relative_to(root)),
        absolute.as_posix(),
    )


def _roots(file: Path) -> list[Path]:
    with_git = [folder for folder in file.parents if (folder / ".git").exists()]
    workspace = os.environ.get("GITHUB_WORKSPACE")
    return [*with_git[:1], *([Path(workspace)] if workspace else []), Path.cwd()]
