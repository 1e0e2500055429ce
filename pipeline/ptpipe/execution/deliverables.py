"""Deliverables: the files to ship of a stage's outputs, placed in the run's folder under the stage's name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ptpipe.artifact import Artifact
from ptpipe.stages import Port
from ptpipe.store.files import atomic_path
from ptpipe.store.store import Entry, Store


def may_deliver(type_: type[Artifact]) -> bool:
    """Return whether artifacts of this type may have deliverables."""
    return type_.deliverables.__func__ is not Artifact.deliverables.__func__  # type: ignore[attr-defined]


def place_deliverables(store: Store, ports: Sequence[Port], entry: Entry, folder: Path) -> dict[Path, tuple[str, str]]:
    """Hard-link (or copy, where the file system has no hard links) an entry's deliverables into a folder.

    `folder` is created where there is something to place. With several outputs that name the same file, each output
    has a subfolder. Returns for each placed file the output and the name of its file there. Raises OSError where one
    can't be written, ValueError where an artifact names a file that it did not save.
    """
    named: dict[str, tuple[str, ...]] = {}
    for port in ports:
        digest = entry.outputs[port.name].digest
        names = tuple(port.type.deliverables(store.files(digest)))
        if strange := [name for name in names if name not in store.listing(digest)]:
            raise ValueError(f"{port.type.__name__}.deliverables names {strange[0]!r}, which it did not save")
        named[port.name] = names
    all_names = [name for names in named.values() for name in names]
    is_ambiguous = len(set(all_names)) < len(all_names)
    placed = {}
    for output, names in named.items():
        for name in names:
            target = (folder / output if is_ambiguous else folder) / name
            _place(store.files(entry.outputs[output].digest) / name, target)
            placed[target] = (output, name)
    return placed


def copy_atomically(source: Path, target: Path) -> None:
    """Copy a file's content; `target` is replaced when all of it is written."""
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # renaming onto a link to the same inode would do nothing
    try:
        os.link(source, target)
    except OSError:  # no hard links on this file system, or another user's file (fs.protected_hardlinks)
        copy_atomically(source, target)
