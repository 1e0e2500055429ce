"""The files of arrays. Imports no numpy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, StageError
from ptpipe_data.paths import written_names
from ptpipe_torch.files import file_digest
from ptpipe_torch.paths import find_path

if TYPE_CHECKING:
    from ptpipe_data.config import ArraysConfig

_SUFFIXES = (".npz", ".safetensors")


def find_arrays(path: str) -> Path:
    """Return a file of arrays, or a folder of such, as an absolute path. Raises StageError for anything else."""
    found = find_path(path)
    if found.is_dir():
        if not array_files(found):
            raise StageError(f"{found} has no .npy files")
    elif not (found.is_file() and found.suffix in _SUFFIXES):
        raise StageError(f"{found}: arrays are in .npz or .safetensors files, or in folders of .npy files")
    return found


def array_files(folder: Path) -> list[Path]:
    """Return the `.npy` files of a folder, sorted."""
    return sorted(file for file in folder.iterdir() if file.suffix == ".npy" and file.is_file())


def fingerprint(config: ArraysConfig) -> JSON:
    """Return the digest of every file by its path as it is written."""
    digests: dict[str, JSON] = {}
    for path in config.paths.values():
        found = find_arrays(path)
        names = written_names(path, found, array_files(found) if found.is_dir() else [found])
        digests |= {name: file_digest(file) for name, file in names.items()}
    return digests
