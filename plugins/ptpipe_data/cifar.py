"""CIFAR-10's binary version: records of a label byte and 32 x 32 red, then green, then blue bytes.

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
from ptpipe_data.idx import make_pool
from ptpipe_data.published import Published, file_digest
from ptpipe_torch.data.data import Split

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
_SIDE, _CHANNELS = 32, 3
_RECORD_BYTES = 1 + _CHANNELS * _SIDE * _SIDE
_MAX_BATCH_BYTES = 1 << 30
_READ_BYTES = 1 << 20


def read_cifar_pools(published: Published, found: Mapping[str, Path], verify: bool) -> tuple[Split, Split, list[str]]:
    """Training and test samples, and the files whose content could not be checked against a published digest.

    Raises StageError for a damaged or altered file, naming it. Without `verify`, only the format is checked.
    """
    (part,) = published.parts
    path = found[part.file]
    packed = not path.is_dir()
    if verify and packed and file_digest(path, "md5") != part.md5:
        raise StageError(
            f"{path} is truncated or altered: it is not the published {published.title} "
            "(to use data of your own: verify: false)"
        )
    batches = {
        name: _parse(content, f"{path}/{name}") for name, content in (_members(path) if packed else _files(path))
    }
    for name in (*TRAIN_FILES, TEST_FILE):
        if name not in batches:
            raise StageError(f"{path} lacks {name}")
    pools = []
    for split, names in (("train", TRAIN_FILES), ("test", (TEST_FILE,))):
        pixels = np.concatenate([batches[name][0] for name in names])
        pools.append(make_pool(split, pixels, np.concatenate([batches.pop(name)[1] for name in names])))
    return pools[0], pools[1], [] if packed or not verify else [str(path)]


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in (*TRAIN_FILES, TEST_FILE):
        if (folder / name).exists():
            yield name, (folder / name).read_bytes()


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Contents of the archive's batches, unpacked in memory: no path in the archive is ever written to."""
    try:
        with gzip.open(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
            for member in tar:
                name = Path(member.name).name
                if name not in (*TRAIN_FILES, TEST_FILE) or not member.isfile():
                    continue
                if member.size > _MAX_BATCH_BYTES:
                    raise StageError(f"{archive} is damaged: {name} is said to have {member.size} bytes")
                file = tar.extractfile(member)
                assert file is not None
                yield name, file.read()
            while unpacked.read(_READ_BYTES):  # to the end, where gzip's checksum is
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise StageError(f"{archive} is damaged or truncated: {error}") from error


def _parse(content: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    if not content or len(content) % _RECORD_BYTES:
        raise StageError(
            f"{name} is truncated or altered: {len(content)} bytes are no whole number of {_RECORD_BYTES}-byte records"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD_BYTES)
    pixels_NCHW = records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return np.ascontiguousarray(pixels_NCHW.transpose(0, 2, 3, 1)), records[:, 0]
