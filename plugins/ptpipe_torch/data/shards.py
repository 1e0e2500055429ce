"""Columns whose values lie in tar files (shards), as members that are read by their positions when they are taken.

So a data set may be larger than memory, and samples can be read in any order, which is a function of seed and epoch as
for every other column.

Shape legend: N samples, B of a batch, V values of all rows.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ptpipe import StageError, one_line
from ptpipe_torch.data.column import Column, RaggedColumn
from ptpipe_torch.files import open_regular

MAX_MEMBER_BYTES = 256 << 20
"""A larger member is refused: it would be read into memory."""
MAX_LENGTH = 1 << 16
"""Of a row of values of a varying number."""
ReadRange: TypeAlias = Callable[[int, int], bytes]
"""From a size and an offset to so many bytes of a shard; fewer where the shard ends."""
DType: TypeAlias = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64"
]


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Shard(_Facts):
    """A tar file."""

    name: str = Field(pattern=r"^[^/\x00-\x1f]+$")
    size_bytes: NonNegativeInt


class Member(NamedTuple):
    """The content of a member, for one row of a batch."""

    row: int
    name: str
    """For errors: the shard and the sample."""
    content: bytes


class MemberFormat(_Facts, ABC):
    """What the members of a column hold, and how a batch of them becomes an array."""

    @property
    def size_bytes(self) -> int | None:
        """The size of each member; None where they differ."""
        return None

    def lengths(self, sizes_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the number of values in members of these sizes, in bytes; None where all have one shape."""
        return None

    @abstractmethod
    def decode(self, members: Iterable[Member], num_rows: int) -> npt.NDArray[Any]:
        """Return the values, of shape (B, ...). Raises StageError, with the member's name, for one that is none."""


class ArrayMembers(MemberFormat):
    """Arrays of one shape, as `.npy` files."""

    kind: Literal["array"] = "array"
    dtype: DType
    shape: tuple[NonNegativeInt, ...] = Field(max_length=16)
    """Of a sample."""

    @property
    def value_bytes(self) -> int:
        """The size of a sample's array."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.value_bytes + len(npy_header(self.dtype, self.shape))

    def decode(self, members: Iterable[Member], num_rows: int) -> npt.NDArray[Any]:
        values_B = np.empty((num_rows, *self.shape), dtype=self.dtype)
        for row, name, content in members:
            values_B[row] = _read_npy(name, content, self.dtype, self.shape)
        return values_B


class RaggedMembers(MemberFormat):
    """Rows of different lengths, as `.npy` files, that are padded on the right; see `RaggedColumn`."""

    kind: Literal["ragged"] = "ragged"
    dtype: DType
    padding: int
    length: PositiveInt | None = Field(default=None, le=MAX_LENGTH)

    def lengths(self, sizes_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        bytes_N = np.maximum(0, sizes_N - len(npy_header(self.dtype, (0,))))
        return bytes_N // np.dtype(self.dtype).itemsize

    def decode(self, members: Iterable[Member], num_rows: int) -> npt.NDArray[Any]:
        rows_B = [np.empty(0, dtype=self.dtype)] * num_rows
        for row, name, content in members:
            (length,) = self.lengths(np.array([len(content)])).tolist()
            if length > (self.length or MAX_LENGTH):
                raise StageError(f"{name} has {length} values; the maximum is {self.length or MAX_LENGTH}")
            rows_B[row] = _read_npy(name, content, self.dtype, (length,))
        values_V = np.concatenate([np.empty(0, dtype=self.dtype), *rows_B])
        offsets_B = np.cumsum([0, *map(len, rows_B)])
        return RaggedColumn(values_V, offsets_B, self.padding, self.length).take(np.arange(num_rows))


@dataclass(frozen=True, eq=False)
class TarMembers:
    """Where the members of one column are: one of each sample."""

    root: Path
    shards: tuple[Shard, ...]
    """Files in `root`."""
    keys_N: npt.NDArray[np.bytes_]
    """UTF-8: what the names of a sample's members begin with, for errors."""
    members_N3: npt.NDArray[np.int64]
    """The number of the shard; where the content begins in it; its size, both in bytes."""

    def __len__(self) -> int:
        return len(self.members_N3)

    def subset(self, positions: npt.NDArray[np.int64]) -> TarMembers:
        """Return the members of these samples, in this order."""
        return replace(self, keys_N=self.keys_N[positions], members_N3=self.members_N3[positions])

    def check(self) -> None:
        """Raise ValueError where members can't be where this places them."""
        if self.members_N3.shape != (len(self.keys_N), 3):
            raise ValueError(f"{len(self.keys_N)} keys of members {self.members_N3.shape}")
        shard_N, offset_N, size_N = self.members_N3.T
        shard_ends = np.array([shard.size_bytes for shard in self.shards], dtype=np.int64)
        if not len(self):
            return
        if self.members_N3.min() < 0 or shard_N.max() >= len(shard_ends) or size_N.max() > MAX_MEMBER_BYTES:
            raise ValueError(f"members of shards, positions or sizes that can't be: {self.members_N3.max(axis=0)}")
        if (offset_N > shard_ends[shard_N] - size_N).any():
            raise ValueError("members lie beyond the end of their shards")
        order_N = np.lexsort((offset_N, shard_N))
        is_same = shard_N[order_N][1:] == shard_N[order_N][:-1]
        if (is_same & (offset_N[order_N][1:] < (offset_N + size_N)[order_N][:-1])).any():
            raise ValueError("members overlap")

    def read(self, indices_B: npt.NDArray[np.int64]) -> Iterator[Member]:
        """Yield the members of these samples, in the order in which they lie in the shards.

        Raises StageError, with shard and sample, where a shard is missing, was changed or can't be read.
        """
        members_B3 = self.members_N3[indices_B]
        order_B = np.lexsort((members_B3[:, 1], members_B3[:, 0]))
        ordered = zip(order_B.tolist(), members_B3[order_B].tolist(), self.keys_N[indices_B[order_B]], strict=True)
        for number, group in groupby(ordered, key=lambda item: item[1][0]):
            shard = self.shards[number]
            path = self.root / shard.name
            with open_shard(path, shard) as read_range:
                for row, (_, offset, size), key in group:
                    name = f"{path}: sample {one_line(key.decode(errors='replace'))}"
                    yield Member(row, name, _read_member(read_range, offset, size, name))


@dataclass(frozen=True, eq=False)
class TarColumn(Column):
    """Values in members of shards, decoded when they are taken, in bounded memory."""

    members: TarMembers
    format: MemberFormat

    def __len__(self) -> int:
        return len(self.members)

    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the values, of shape (B, ...). Raises StageError with shard and sample."""
        return self.format.decode(self.members.read(indices_B), len(indices_B))

    def blocks(self) -> npt.NDArray[np.int64]:
        return self.members.members_N3[:, 0]

    @property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        return self.format.lengths(self.members.members_N3[:, 2])

    def check(self) -> None:
        """Raise ValueError where members can't be where this places them, or not of this format."""
        self.members.check()
        size_bytes = self.format.size_bytes
        if size_bytes is not None and (self.members.members_N3[:, 2] != size_bytes).any():
            raise ValueError(f"members of other sizes than {size_bytes} bytes")


@contextmanager
def open_shard(path: Path, shard: Shard) -> Iterator[ReadRange]:
    """Open a shard for reading. One that is no local file would need another such function, and nothing else.

    Raises StageError where it is missing, or was changed since its members were listed.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError as error:
        raise StageError(f"{path} is gone; put it back, or rerun the data stage with --fresh") from error
    except OSError as error:
        raise StageError(f"{path} can't be read: {error.strerror}") from error
    with file:
        descriptor = file.fileno()
        found = os.fstat(descriptor).st_size
        if found > shard.size_bytes:
            raise StageError(changed(path, found, shard))
        yield lambda size, offset: os.pread(descriptor, size, offset)


def changed(path: Path, size_bytes: int, shard: Shard) -> str:
    """Describe a shard that is no longer what it was."""
    return (
        f"{path} has {size_bytes:,} bytes, and had {shard.size_bytes:,} when the data stage read it; put it back, or "
        "rerun the data stage with --fresh"
    )


def _read_member(read_range: ReadRange, offset: int, size: int, name: str) -> bytes:
    try:
        content = read_range(size, offset)
    except OSError as error:
        raise StageError(f"{name} can't be read: {error.strerror}") from error
    if len(content) < size:
        raise StageError(
            f"{name} is truncated: {len(content):,} of its {size:,} bytes are there; put the shard back, or rerun the "
            "data stage with --fresh"
        )
    return content


@lru_cache(4096)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what a `.npy` file begins with that holds a C-contiguous, little-endian array (format version 1.0).

    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    descr = np.dtype(dtype).newbyteorder("<").str
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()


def write_npy(array: npt.NDArray[Any]) -> bytes:
    """Return an array as a `.npy` file."""
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return npy_header(array.dtype.name, array.shape) + array.tobytes()


def _read_npy(name: str, content: bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    # One header fits, so none is parsed: NumPy's own parser runs Python's, on a stranger's text.
    header = npy_header(dtype, shape)
    array_type = np.dtype(dtype).newbyteorder("<")
    size_bytes = len(header) + math.prod(shape) * array_type.itemsize
    if not content.startswith(header) or len(content) != size_bytes:
        raise StageError(f"{name} has no .npy file of {dtype} {shape}, which this column holds")
    return np.frombuffer(content, array_type, offset=len(header)).reshape(shape)
