"""Reader of CIFAR-10's binary version: records of a label byte and 32 x 32 red, then green, then blue bytes.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.catalog import CatalogEntry, file_digest
from ptpipe_data.idx import make_split
from ptpipe_torch.data.data import Split

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
_SIDE, _CHANNELS = 32, 3
_RECORD_BYTES = 1 + _CHANNELS * _SIDE * _SIDE
_MAX_BATCH_BYTES = 1 << 30
_READ_BYTES = 1 << 20


def read_cifar_splits(entry: CatalogEntry, found: Mapping[str, Path], verify: bool) -> tuple[Split, Split, list[str]]:
    """Return training and test samples, and the paths of files that no published digest is known for.

    `found`: local path of each published file. Raises StageError with the path of a damaged or altered file. Without
    `verify`, only the format is checked.
    """
    (file,) = entry.files
    path = found[file.name]
    is_packed = not path.is_dir()
    if verify and is_packed and file_digest(path, "md5") != file.md5:
        raise StageError(
            f"{path} is truncated or altered: it is not the published {entry.title} (to use your own data: "
            "verify: false)"
        )
    batches = {
        name: _parse(content, f"{path}/{name}")
        for name, content in (_archive_members(path) if is_packed else _folder_files(path))
    }
    for name in (*TRAIN_FILES, TEST_FILE):
        if name not in batches:
            raise StageError(f"{path} does not contain {name}")
    splits = []
    for split, names in (("train", TRAIN_FILES), ("test", (TEST_FILE,))):
        pixels = np.concatenate([batches[name][0] for name in names])
        splits.append(make_split(split, pixels, np.concatenate([batches.pop(name)[1] for name in names])))
    return splits[0], splits[1], [] if is_packed or not verify else [str(path)]


def _folder_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in (*TRAIN_FILES, TEST_FILE):
        if (folder / name).exists():
            yield name, (folder / name).read_bytes()


def _archive_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the batches, unpacked in memory: no path in the archive is ever written to."""
    try:
        with gzip.open(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
            for member in tar:
                name = Path(member.name).name
                if name not in (*TRAIN_FILES, TEST_FILE) or not member.isfile():
                    continue
                if member.size > _MAX_BATCH_BYTES:
                    raise StageError(f"{archive} is damaged: its header gives {name} {member.size} bytes")
                file = tar.extractfile(member)
                assert file is not None
                yield name, file.read()
            while unpacked.read(_READ_BYTES):  # to the end: gzip's checksum is verified there
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise StageError(f"{archive} is damaged or truncated: {error}") from error


def _parse(content: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    if not content or len(content) % _RECORD_BYTES:
        raise StageError(
            f"{name} is truncated or altered: {len(content)} bytes are not a multiple of {_RECORD_BYTES}-byte records"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD_BYTES)
    pixels_NCHW = records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return np.ascontiguousarray(pixels_NCHW.transpose(0, 2, 3, 1)), records[:, 0]
