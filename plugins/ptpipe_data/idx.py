"""Reader of IDX files, the format of MNIST: a magic number, the sizes of the dimensions, the values.

Shape legend: N images, H height, W width.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.catalog import CatalogEntry, RemoteFile
from ptpipe_data.labelled_images import labelled_images
from ptpipe_torch.data.column import ArrayColumn
from ptpipe_torch.data.data import Split
from ptpipe_torch.files import open_regular

MAX_BYTES = 4 << 30
"""Maximum size of a data set's file, packed or unpacked."""
_MAX_IMAGES = 5_000_000
"""Each has an id, which takes more memory than an image of a few pixels."""
_UNSIGNED_BYTE = 0x08
_GZIP = 16 + zlib.MAX_WBITS
_BLOCK_BYTES = 16 << 10
_MAX_HEADER_BYTES = 4 + 4 * 255
_MAX_PUBLISHED_RATIO = 64
"""No published file unpacks to more times its size."""


def max_unpacked_bytes(packed_bytes: int) -> int:
    """Return the size up to which a compressed file is unpacked: 16 MiB, or 100 times its own size up to 4 GiB.

    Images and labels are far from it; a kilobyte of gzip that unpacks to a megabyte is made to fill the memory.
    """
    return min(max(16 << 20, 100 * packed_bytes), MAX_BYTES)


def parse_idx(content: bytes | bytearray, name: str) -> npt.NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes, without copying `content`.

    Raises StageError with `name` and the reason for anything else. Format: http://yann.lecun.com/exdb/mnist, "THE IDX
    FILE FORMAT".
    """
    shape, header_bytes = _parse_header(content, name)
    expected, actual = int(np.prod(shape, dtype=object)) if shape else 1, len(content) - header_bytes
    if actual != expected:
        sizes = " x ".join(str(size) for size in shape)
        error = "is truncated" if actual < expected else "is longer than its header says"
        raise StageError(f"{name} {error}: the header announces {sizes} = {expected} bytes, found {actual}")
    try:
        return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)
    except ValueError as error:  # too many dimensions for NumPy, or sizes beside a 0 whose product overflows
        raise StageError(
            f"{name} is damaged: its header announces an array of {len(shape)} dimensions, {shape[:4]}"
        ) from error


def _parse_header(content: bytes | bytearray, name: str) -> tuple[tuple[int, ...], int]:
    """Return the shape that a file announces, and where its values start."""
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
    sizes = np.frombuffer(content, dtype=">u4", count=num_dimensions, offset=4)
    return tuple(int(size) for size in sizes), header_bytes


def gunzip(content: bytes, name: str, max_bytes: int = MAX_BYTES) -> bytearray:
    """Unpack one gzip member of at most `max_bytes`, and check its CRC-32 and length.

    Raises StageError with `name` and the reason.
    """
    unpacker, unpacked, end = zlib.decompressobj(_GZIP), bytearray(), 0
    try:
        while end < len(content) and not unpacker.eof and len(unpacked) <= max_bytes:
            block = content[end : end + _BLOCK_BYTES]
            unpacked += unpacker.decompress(block, max_bytes + 1 - len(unpacked))
            end += len(block)
    except zlib.error as error:
        raise StageError(f"{name} is damaged: {str(error).rpartition(': ')[2]}") from error
    if len(unpacked) > max_bytes:
        raise StageError(f"{name} is damaged: it unpacks to more than the {max_bytes} bytes that it announces")
    if not unpacker.eof:
        raise StageError(f"{name} is truncated: the compressed data has no end")
    if num_unused := len(unpacker.unused_data) + len(content) - end:
        raise StageError(f"{name} is damaged: {num_unused} bytes follow the end of the compressed data")
    return unpacked


def _unpack(content: bytes, name: str, max_bytes: int) -> bytearray:
    """Unpack an IDX file, as many bytes as its header announces."""
    try:
        head = zlib.decompressobj(_GZIP).decompress(content, _MAX_HEADER_BYTES)
    except zlib.error:
        head = b""  # `gunzip` says what is wrong
    if len(head) < _MAX_HEADER_BYTES:
        return gunzip(content, name, _MAX_HEADER_BYTES)
    shape, header_bytes = _parse_header(head, name)
    num_bytes = header_bytes + int(np.prod(shape, dtype=object))
    if num_bytes > max_bytes:
        raise StageError(
            f"{name} announces more than {max_bytes} bytes, suspiciously many for a gzip file of {len(content)}: "
            "if you trust it, unpack it with gunzip"
        )
    return gunzip(content, name, num_bytes)


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
    max_bytes = MAX_BYTES if title is None else _MAX_PUBLISHED_RATIO * file.size_bytes
    altered = StageError(f"{path} was altered: it is not the published {title} (to use your own data: verify: false)")
    stored = read_bytes(path, max_bytes)
    is_published = is_packed and hashlib.md5(stored, usedforsecurity=False).hexdigest() == file.md5
    if is_packed and title is not None and not is_published and file.unpacked_sha256 is None:
        raise altered
    limit = min(max_bytes, max_unpacked_bytes(len(stored)))
    content = _unpack(stored, str(path), limit) if is_packed else stored
    array = parse_idx(content, str(path))
    if title is None or is_published:
        return array, is_published
    if file.unpacked_sha256 is None and not is_packed:
        return array, False
    if file.unpacked_sha256 is None or hashlib.sha256(content).hexdigest() != file.unpacked_sha256:
        raise altered
    return array, True


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return a file's content. Raises StageError with its path where it can't be read or is larger than that."""
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > max_bytes:
                raise StageError(f"{path} is too large: {num_bytes} bytes, where at most {max_bytes} are expected")
            return file.read(num_bytes)
    except OSError as error:
        raise StageError(f"{path} can't be read: {error.strerror}") from error


def _split(name: str, images_NHW: npt.NDArray[np.uint8], labels_N: npt.NDArray[np.uint8], paths: list[Path]) -> Split:
    if images_NHW.ndim != 3 or 0 in images_NHW.shape:
        raise StageError(f"{paths[0]} holds an array of shape {images_NHW.shape}, not images (N x H x W)")
    if len(images_NHW) > _MAX_IMAGES:
        raise StageError(f"{paths[0]} holds {len(images_NHW)} images; at most {_MAX_IMAGES} are supported")
    if labels_N.shape != images_NHW.shape[:1]:
        raise StageError(
            f"{paths[1]} holds labels of shape {labels_N.shape} for the {len(images_NHW)} images in {paths[0]}"
        )
    return make_split(name, images_NHW[..., np.newaxis], labels_N)


def make_split(name: str, pixels_NHWC: npt.NDArray[np.uint8], labels_N: npt.NDArray[np.integer]) -> Split:
    """Return a split of all these samples, with ids `name/00000`, `name/00001` and so on."""
    last = f"{name}/{max(0, len(labels_N) - 1):05d}"
    ids_iter = (f"{name}/{number:05d}" for number in range(len(labels_N)))
    ids = np.fromiter(ids_iter, dtype=f"U{len(last)}", count=len(labels_N))
    return labelled_images(ids, ArrayColumn(pixels_NHWC), labels_N.astype(np.int64))
