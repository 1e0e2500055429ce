"""Folders of splits, and names of files in ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ptpipe import StageError

_OTHER_NAMES = {
    "train": ("training",),
    "val": ("valid", "validation", "dev", "development"),
    "test": ("testing", "eval", "evaluation"),
}
"""What folders of splits are called elsewhere."""


def split_folders(root: Path) -> dict[str, str]:
    """Return the folder of each split, relative to `root`: the root itself is train's where none is called train.

    Raises StageError where folders are called otherwise than splits are, and can be nothing else.
    """
    folders = [entry.name for entry in sorted(root.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    found = {name: name for name in _OTHER_NAMES if (root / name).is_dir()}
    meant = {folder: split for folder in folders if (split := _split_called(folder))}
    if "train" not in found and (len(meant) < len(folders) or len(folders) < 2):
        return {"train": ""}
    others = [folder for folder, split in meant.items() if split not in found or "train" not in found]
    if others:
        named = ", ".join(others)
        raise StageError(
            f"{root} has folders called {named}: splits are called train, val and test; rename or move them"
        )
    return found


def dataset_name(path: Path) -> str:
    """Return what the data set in a file or folder is called: by the folder around it where it is called as a split."""
    name = path.name if path.is_dir() else path.stem
    return path.parent.name or name if _split_called(name) else name


def _split_called(folder: str) -> str | None:
    """Return the split that a folder's name means, whatever its case."""
    return next((split for split, others in _OTHER_NAMES.items() if folder.lower() in (split, *others)), None)


def written_names(path: str, found: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Return files by what a key calls them: as a manifest does, so that a project that is copied keeps its results.

    `path`: as it is written, which `find_path` has found as `found`. `files`: in that folder, or the file itself.
    """
    written = path if Path(path).name == found.name else f"{path} ({found.name})"  # `.` names what its folder is called
    return {written if file == found else f"{written}/{file.relative_to(found).as_posix()}": file for file in files}


def id_prefixes(paths: Mapping[str, Path], written: Mapping[str, str]) -> dict[str, str]:
    """Return what ids of each path's samples begin with: its name, or all of it where names alone are the same.

    `written`: the paths as they are written in a manifest.
    """
    names = [path.name for path in paths.values()]
    return {
        key: written.get(key, str(path)) if names.count(path.name) > 1 else path.name for key, path in paths.items()
    }
