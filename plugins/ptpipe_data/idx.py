"""Reader of IDX files, the format of MNIST: a magic number, the sizes of the dimensions, the values.

Shape legend: N images, H height, W width.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.catalog import CatalogEntry, RemoteFile
from ptpipe_torch.data.data import Split
from ptpipe_torch.data.images import ArrayImages

_UNSIGNED_BYTE = 0x08
_GZIP = 16 + zlib.MAX_WBITS
_MAX_BYTES = 4 << 30
"""Limit of the unpacked size: a small gzip file can unpack to any size."""


def parse_idx(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes, without copying `content` (the array is read-only).

    Raises StageError with `name` and the reason for anything else. Format: http://yann.lecun.com/exdb/mnist, "THE IDX
    FILE FORMAT".
    """
    if len(content) < 4 or content[:2] != b"\0\0":
        raise StageError(
            f"{name} is not an IDX file: it starts with {content[:4].hex(' ') or 'nothing'}, not with 00 00"
        )
    kind, num_dimensions = content[2], content[3]
    if kind != _UNSIGNED_BYTE:
        raise StageError(f"{name} holds values of IDX type 0x{kind:02x}; only unsigned bytes (0x08) are supported")
    header_bytes = 4 + 4 * num_dimensions
    if len(content) < header_bytes:
        raise StageError(f"{name} is truncated: it ends inside the header")
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=num_dimensions, offset=4))
    expected, actual = int(np.prod(shape, dtype=object)) if shape else 1, len(content) - header_bytes
    if actual != expected:
        sizes = " x ".join(str(size) for size in shape)
        verb = "is truncated" if actual < expected else "is longer than its header says"
        raise StageError(f"{name} {verb}: the header announces {sizes} = {expected} bytes, found {actual}")
    try:
        return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)
    except ValueError as error:  # too many dimensions for NumPy, or sizes beside a 0 whose product overflows
        raise StageError(
            f"{name} is damaged: its header announces an array of {len(shape)} dimensions, {shape[:4]}"
        ) from error


def gunzip(content: bytes, name: str) -> bytes:
    """Unpack one gzip member and check its CRC-32 and length. Raises StageError with `name` and the reason."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        unpacked = unpacker.decompress(content, _MAX_BYTES)
    except zlib.error as error:
        raise StageError(f"{name} is damaged: {str(error).rpartition(': ')[2]}") from error
    if not unpacker.eof:
        too_long = len(unpacked) == _MAX_BYTES
        reason = "unpacks to more than 4 GiB" if too_long else "is truncated: the compressed data has no end"
        raise StageError(f"{name} {reason}")
    if unpacker.unused_data:
        raise StageError(f"{name} is damaged: {len(unpacker.unused_data)} bytes follow the end of the compressed data")
    return unpacked


def read_idx_splits(entry: CatalogEntry, found: Mapping[str, Path], verify: bool) -> tuple[Split, Split, list[str]]:
    """Return training and test samples, and the paths of files that no published digest is known for.

    `found`: local path of each published file. Raises StageError with the path of a damaged, altered or inconsistent
    file. Without `verify`, only formats and shapes are checked.
    """
    arrays, unverified = [], []
    for file in entry.files:
        array, is_verified = _read_file(file, found[file.name], entry.title if verify else None)
        arrays.append(array)
        unverified += [] if is_verified else [str(found[file.name])]
    paths = [found[file.name] for file in entry.files]
    train = _split("train", arrays[0], arrays[1], paths[:2])
    test = _split("test", arrays[2], arrays[3], paths[2:])
    if arrays[0].shape[1:] != arrays[2].shape[1:]:
        raise StageError(f"{paths[0]} has images of {arrays[0].shape[1:]}, {paths[2]} of {arrays[2].shape[1:]} pixels")
    return train, test, unverified if verify else []


def _read_file(file: RemoteFile, path: Path, title: str | None) -> tuple[npt.NDArray[np.uint8], bool]:
    """Return the array, and whether a published digest confirmed it. `title`: None skips the comparison."""
    is_packed = path.name == file.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StageError(f"{path} can't be read: {error.strerror}") from error
    is_published = is_packed and hashlib.md5(content, usedforsecurity=False).hexdigest() == file.md5
    content = gunzip(content, str(path)) if is_packed else content
    array = parse_idx(content, str(path))
    if title is None or is_published:
        return array, is_published
    if file.unpacked_sha256 is None and not is_packed:
        return array, False
    if file.unpacked_sha256 is None or hashlib.sha256(content).hexdigest() != file.unpacked_sha256:
        raise StageError(f"{path} was altered: it is not the published {title} (to use your own data: verify: false)")
    return array, True


def _split(name: str, images_NHW: npt.NDArray[np.uint8], labels_N: npt.NDArray[np.uint8], paths: list[Path]) -> Split:
    if images_NHW.ndim != 3 or 0 in images_NHW.shape:
        raise StageError(f"{paths[0]} holds an array of shape {images_NHW.shape}, not images (N x H x W)")
    if labels_N.shape != images_NHW.shape[:1]:
        raise StageError(
            f"{paths[1]} holds labels of shape {labels_N.shape} for the {len(images_NHW)} images in {paths[0]}"
        )
    return make_split(name, images_NHW[..., np.newaxis], labels_N)


def make_split(name: str, pixels_NHWC: npt.NDArray[np.uint8], labels_N: npt.NDArray[np.integer]) -> Split:
    """Return a split of all these samples, with ids `name/00000`, `name/00001` and so on."""
    ids = np.array([f"{name}/{number:05d}" for number in range(len(labels_N))], dtype=np.str_)
    return Split(ids, labels_N.astype(np.int64), ArrayImages(pixels_NHWC))
