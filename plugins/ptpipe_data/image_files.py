"""The image files below a folder. Imports no numpy."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ptpipe import StageError
from ptpipe_torch.data.images import FORMATS, open_image_file, orientation

SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
_NOT_READ = frozenset((".avif", ".gif", ".heic", ".heif", ".jp2", ".jxl", ".svg", ".tga"))
_MAX_DEPTH = 32
_MAX_PATH = 512
"""In an array of paths each takes as much memory as the longest."""
_MAX_LINKS = 2
"""Links to folders are followed where a split or a class is one. More, one inside another, may be a loop."""
_MAX_NAMED = 5
_MAX_PIXELS = 178_000_000
"""Pillow opens no larger image; of others, `max_pixels` is checked where they are decoded."""


def walk(folder: Path, relative: str = "", num_links: int = 0) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield relative path and entry of each image file below a folder, sorted by name, without hidden ones.

    Also those of formats that are not read. `relative`: what paths begin with. `num_links`: how many links to folders
    led to `folder`.
    """
    if num_links > _MAX_LINKS or relative.count("/") > _MAX_DEPTH:
        reason = "its links to folders may be a loop" if num_links > _MAX_LINKS else "folders are nested too deeply"
        raise StageError(f"{str(folder)!r}: {reason}")
    try:
        with os.scandir(folder) as entries:
            found = [(entry, entry.is_dir(), entry.is_file()) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:  # also a link to itself
        raise StageError(f"{error.filename!r} can't be read: {error.strerror}") from error
    for entry, is_folder, is_file in sorted(found, key=lambda item: item[0].name):
        path = f"{relative}{entry.name}"
        if is_folder:
            yield from walk(folder / entry.name, f"{path}/", num_links + entry.is_symlink())
        elif suffix_of(path) in SUFFIXES | _NOT_READ:
            if not is_file:
                raise StageError(f"{entry.path!r} is neither a file nor a folder: remove it")
            yield path, entry


def suffix_of(path: str) -> str:
    """Return the suffix in lower case."""
    return os.path.splitext(path)[1].lower()  # noqa: PTH122 - a Path per file is slow


def list_files(folder: Path, notice: Callable[[str], None]) -> list[str]:
    """Return the relative paths of the image files below a folder, sorted, without hidden ones.

    `notice`: gets the number of those whose format is not read. Raises StageError for a name that can't be printed, or
    is too long.
    """
    listed = [path for path, _ in walk(folder)]
    paths = [path for path in listed if suffix_of(path) in SUFFIXES]
    if len(paths) < len(listed):
        counts = Counter(suffix_of(path) for path in listed if suffix_of(path) in _NOT_READ)
        text = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items()))
        notice(f"{folder}: files that are not read: {text}; convert them to JPEG or PNG")
    for path in paths:
        check_name(folder, path)
    return paths


def check_name(folder: Path, path: str) -> None:
    """Raise StageError where a path relative to `folder` can't be printed, or is too long."""
    if not path.isprintable():  # a name that is not UTF-8 has surrogates, which are not printable
        raise StageError(f"{str(folder / path)!r}: rename it; image names must be printable UTF-8")
    if len(path) > _MAX_PATH:
        raise StageError(f"{folder / path} is longer than {_MAX_PATH} characters: rename it")


def check_headers(root: Path, paths: Iterable[str], notice: Callable[[str], None]) -> None:
    """Read the headers of the files below `root`; give a notice of those that are turned by their EXIF orientation.

    Raises StageError, with the first of them, where files are empty or have no image's header.
    """
    damaged, num_files, num_turned = [], 0, 0
    for path in paths:
        num_files += 1
        try:
            with open_image_file(root / path, _MAX_PIXELS) as image:
                num_turned += orientation(image) != 1
        except StageError as error:
            damaged.append((path, _damage(root / path, error)))
    if damaged:
        _refuse(damaged)
    if num_turned:
        notice(
            f"{num_turned:,} of {num_files:,} images in {root} have an EXIF orientation: they are turned upright; so "
            "must be what the model gets in use"
        )


def _refuse(damaged: Sequence[tuple[str, str]]) -> NoReturn:
    (_, reason), *others = damaged
    if not others:
        raise StageError(f"{reason}; remove or replace it")
    more = f" and {len(damaged) - _MAX_NAMED:,} more" if len(damaged) > _MAX_NAMED else ""
    named = ", ".join(path for path, _ in others[: _MAX_NAMED - 1])
    raise StageError(f"{reason}. {len(damaged):,} files are no images: also {named}{more}; remove or replace them")


def _damage(path: Path, error: StageError) -> str:
    """Return why the file's header can't be read as an image's."""
    return f"{path} is empty" if path.is_file() and not path.stat().st_size else str(error)
