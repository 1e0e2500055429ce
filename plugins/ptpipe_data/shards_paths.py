"""The files of shards. Imports no numpy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, StageError
from ptpipe_data.image_folder import find_root
from ptpipe_torch.paths import change_stamp

if TYPE_CHECKING:
    from ptpipe_data.image_config import ShardsConfig

DESCRIPTION = "data.json"
"""What `ptpipe shards` writes beside its shards."""


def find_shards(config: ShardsConfig) -> tuple[Path, Mapping[str, list[Path]]]:
    """Return the folder, and its shards by split, sorted; no split but train is empty.

    Raises StageError where the folder or the shards of train are missing, or where a shard is in two splits.
    """
    root = find_root(config.path)
    names = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
    patterns = {"train": config.train, "val": config.val, "test": config.test}
    found = {split: [name for name in names if fnmatchcase(name, pattern)] for split, pattern in patterns.items()}
    if not found["train"]:
        compressed = [name for name in names if fnmatchcase(name, f"{config.train}*")]
        hint = f"; {compressed[0]} is compressed: decompress it" if compressed else ""
        raise StageError(f"{root} has no shards of train: {config.train}{hint}")
    for split, others in found.items():
        for other in list(found)[: list(found).index(split)]:
            if shared := set(others) & set(found[other]):
                raise StageError(f"{root / min(shared)} is a shard of {other} and of {split}")
    for name in (name for names in found.values() for name in names):
        if not name.isprintable():
            raise StageError(f"{str(root / name)!r}: rename it; names of shards must be printable UTF-8")
    return root, {split: [root / name for name in names] for split, names in found.items() if names}


def status_of(path: Path) -> os.stat_result:
    """Return size and times of a shard. Raises StageError where it is none, such as a link to itself."""
    try:
        return path.stat()
    except OSError as error:
        raise StageError(f"{path} can't be read: {error.strerror}") from error


def fingerprint(config: ShardsConfig) -> JSON:
    """Return the folder, the number of shards, and a digest of names, sizes and times of change.

    The description beside the shards is digested as it is.
    """
    root, shards = find_shards(config)
    digest = hashlib.sha256()
    for split, paths in shards.items():
        for path in paths:
            digest.update(change_stamp(f"{split}\0{path.name}", status_of(path)))
    description = root / DESCRIPTION
    if description.is_file():
        digest.update(description.read_bytes())
    return {"root": str(root), "num_shards": sum(map(len, shards.values())), "digest": digest.hexdigest()}
