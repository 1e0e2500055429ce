"""Reader of CIFAR-10's binary version: records of a label byte and 32 x 32 red, then green, then blue bytes.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.catalog import CatalogEntry, RemoteFile
from ptpipe_data.idx import MAX_BYTES, make_split, max_unpacked_bytes, read_bytes
from ptpipe_torch.data.data import Split
from ptpipe_torch.files import file_digest, open_regular

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
_SIDE, _CHANNELS = 32, 3
_RECORD_BYTES = 1 + _CHANNELS * _SIDE * _SIDE
_MAX_MEMBERS = 1000
_READ_BYTES = 256 << 10
"""More than a header of tar needs: a longer one is read whole by `tarfile`, and kept."""


def read_cifar_splits(entry: CatalogEntry, found: Mapping[str, Path], verify: bool) -> tuple[Split, Split, list[str]]:
    """Return training and test samples, and the paths of files that no published digest is known for.

    `found`: local path of each published file. Raises StageError with the path of a damaged or altered file. Without
    `verify`, only the format is checked.
    """
    (file,) = entry.files
    path = found[file.name]
    is_packed = not path.is_dir()
    if verify and is_packed and not _is_published(path, file):
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


def _is_published(path: Path, file: RemoteFile) -> bool:
    try:
        return path.stat().st_size == file.size_bytes and file_digest(path, "md5") == file.md5
    except OSError as error:
        raise StageError(f"{path} can't be read: {error.strerror}") from error


def _folder_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in (*TRAIN_FILES, TEST_FILE):
        if (folder / name).exists():
            yield name, read_bytes(folder / name, MAX_BYTES)


class _Unpacked(io.RawIOBase):
    """The unpacked stream of an archive, of limited size, to be read in one pass and in small pieces.

    A header of tar can claim any size, also a negative one, which makes `tarfile` read the same header for ever.
    """

    def __init__(self, file: io.BufferedReader, max_bytes: int) -> None:
        self._stream = gzip.GzipFile(fileobj=file)
        self._max_bytes = max_bytes

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _READ_BYTES:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        content = self._stream.read(size)
        self._check(self.tell())
        return content

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if offset < self.tell():
            raise tarfile.ReadError("a header gives a negative size")
        self._check(offset)
        return self._stream.seek(offset, whence)

    def _check(self, offset: int) -> None:
        if offset > self._max_bytes:
            raise tarfile.ReadError(
                f"it unpacks to more than {self._max_bytes} bytes (if you trust it, unpack it with tar)"
            )


def _archive_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the batches, unpacked in memory: no path in the archive is ever written to."""
    try:
        with (
            open_regular(archive) as file,
            _Unpacked(file, max_unpacked_bytes(os.fstat(file.fileno()).st_size)) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r:") as tar,
        ):
            for number, member in enumerate(tar):
                if number == _MAX_MEMBERS:
                    raise tarfile.ReadError(f"it has more than {_MAX_MEMBERS} members")
                name = Path(member.name).name
                if name in (*TRAIN_FILES, TEST_FILE) and member.isreg() and not member.issparse():
                    unpacked.seek(member.offset_data)
                    yield name, b"".join(_blocks(unpacked, member.size))
            while unpacked.read(_READ_BYTES):  # to the end: gzip's checksum is verified there
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
        raise StageError(f"{archive} is damaged or truncated: {error}") from error


def _blocks(unpacked: _Unpacked, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        block = unpacked.read(min(num_bytes, _READ_BYTES))
        if not block:
            raise tarfile.ReadError("it ends inside a member")
        num_bytes -= len(block)
        yield block


def _parse(content: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    if not content or len(content) % _RECORD_BYTES:
        raise StageError(
            f"{name} is truncated or altered: {len(content)} bytes are not a multiple of {_RECORD_BYTES}-byte records"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD_BYTES)
    pixels_NCHW = records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return np.ascontiguousarray(pixels_NCHW.transpose(0, 2, 3, 1)), records[:, 0]
