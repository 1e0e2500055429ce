"""Columns of members of tar shards: the same values as from memory, in any order, from any process."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ptpipe import IntegrityError, StageError
from ptpipe_torch import ArrayColumn, Data, ImageFileColumn, LoaderOptions, RaggedColumn
from ptpipe_torch.data import shards as module
from ptpipe_torch.data.data_folder import read_data
from ptpipe_torch.data.image_members import AnyFormat, ImageMembers
from ptpipe_torch.data.shards import (
    ArrayMembers,
    RaggedMembers,
    Shard,
    TarColumn,
    TarMembers,
    write_npy,
)

from ....datasets import image_info, image_split

NUM, PER_SHARD = 20, 6
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (NUM, 12, 10, 3), dtype=np.uint8)
ROWS = [RNG.integers(0, 1000, size) for size in RNG.integers(0, 9, NUM)]


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    """By NumPy itself."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_column(folder: Path, contents: list[bytes], format_: AnyFormat) -> TarColumn:
    """Write members into shards of a few samples, and list them with the standard library."""
    members, found = [], []
    for number, start in enumerate(range(0, len(contents), PER_SHARD)):
        path = folder / f"train-{number}.tar"
        with tarfile.open(path, "w") as tar:
            for row, content in enumerate(contents[start : start + PER_SHARD], start):
                header = tarfile.TarInfo(f"{row:04}.x")
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))
        with tarfile.open(path) as tar:
            members += [(number, member.offset_data, member.size) for member in tar.getmembers()]
        found.append(Shard(name=path.name, size_bytes=path.stat().st_size))
    keys_N = np.array([f"{row:04}".encode() for row in range(len(contents))])
    column = TarColumn(TarMembers(folder, tuple(found), keys_N, np.array(members, dtype=np.int64)), format_)
    column.check()
    return column


def image_column(folder: Path) -> TarColumn:
    return write_column(folder, [png(pixels) for pixels in PIXELS], ImageMembers(size=8, resize=9))


def from_files(folder: Path) -> ImageFileColumn:
    for row, pixels in enumerate(PIXELS):
        (folder / f"{row}.png").write_bytes(png(pixels))
    return ImageFileColumn(folder, np.array([f"{row}.png".encode() for row in range(NUM)]), 8, 9, 3)


ORDERS = {"all": np.arange(NUM), "some": np.array([13, 2, 13, 19, 0]), "none": np.arange(0)}


@pytest.mark.parametrize("order", ORDERS)
def test_images_are_those_of_files(tmp_path: Path, order: str) -> None:
    taken = image_column(tmp_path).take(ORDERS[order])
    np.testing.assert_array_equal(taken, from_files(tmp_path).take(ORDERS[order]))
    assert taken.flags.writeable and taken.dtype == np.uint8


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "bool", "float16"])
def test_arrays_are_those_of_memory(tmp_path: Path, order: str, dtype: str) -> None:
    values = RNG.integers(0, 2, (NUM, 3, 2)).astype(dtype)
    column = write_column(tmp_path, list(map(npy, values)), ArrayMembers(dtype=dtype, shape=(3, 2)))
    taken = column.take(ORDERS[order])
    np.testing.assert_array_equal(taken, values[ORDERS[order]])
    assert taken.dtype == values.dtype and taken.flags.writeable


def test_numbers_alone_are_arrays_too(tmp_path: Path) -> None:
    column = write_column(tmp_path, [npy(np.int64(row)) for row in range(NUM)], ArrayMembers(dtype="int64", shape=()))
    assert column.values().tolist() == list(range(NUM))


@pytest.mark.parametrize("length", [None, 12])
def test_rows_are_padded_as_in_memory(tmp_path: Path, length: int | None) -> None:
    format_ = RaggedMembers(dtype="int64", padding=-1, length=length)
    column = write_column(tmp_path, list(map(npy, ROWS)), format_)
    memory = RaggedColumn(np.concatenate(ROWS), np.cumsum([0, *map(len, ROWS)]), -1, length)
    for order_B in ORDERS.values():
        np.testing.assert_array_equal(column.take(order_B), memory.take(order_B))
    assert column.lengths is not None
    np.testing.assert_array_equal(column.lengths, memory.lengths)


@pytest.mark.parametrize("array", [PIXELS, PIXELS[..., 0].T, np.float32(0.5), np.arange(3, dtype=">i4"), ROWS[1]])
def test_arrays_are_written_as_numpy_reads_them(array: np.ndarray) -> None:
    read = np.load(io.BytesIO(write_npy(array)), allow_pickle=False)
    np.testing.assert_array_equal(read, array)
    assert read.shape == array.shape and read.dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    "content",
    [b"", npy(np.zeros((2, 3), np.float32)), npy(np.zeros((3, 2))), npy(np.zeros((3, 2), np.float32)) + b"x"],
    ids=["nothing", "another shape", "another type", "more"],
)
def test_what_is_no_such_array_is_named(tmp_path: Path, content: bytes) -> None:
    good = npy(np.zeros((3, 2), np.float32))
    format_ = RaggedMembers(dtype="uint8", padding=0)  # of any size, to get past the check of sizes
    members = write_column(tmp_path, [good, content, good], format_).members
    column = TarColumn(members, ArrayMembers(dtype="float32", shape=(3, 2)))
    column.take(np.array([0, 2]))
    where = re.escape(f"{tmp_path}/train-0.tar: sample 0001 has no .npy file of float32 (3, 2)")
    with pytest.raises(StageError, match=where):
        column.take(np.arange(3))


def test_a_row_that_is_too_long(tmp_path: Path) -> None:
    column = write_column(tmp_path, [npy(np.arange(7))], RaggedMembers(dtype="int64", padding=0, length=6))
    with pytest.raises(StageError, match="sample 0000 has 7 values; the maximum is 6"):
        column.values()


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    contents = [png(PIXELS[0]), b"GIF89a", png(PIXELS[0])[:60]]
    column = write_column(tmp_path, contents, ImageMembers(size=8, resize=8))
    for row, reason in ((1, "it is none of BMP, JPEG"), (2, "truncated")):
        with pytest.raises(StageError, match=f"train-0.tar: sample 000{row} can't be read as an image: .*{reason}"):
            column.take(np.array([row]))
    small = write_column(tmp_path, contents, ImageMembers(size=8, resize=8, max_pixels=119))
    with pytest.raises(StageError, match="sample 0000 has 10 x 12 pixels, more than max_pixels: 119"):
        small.take(np.array([0]))


def make_data(folder: Path, **options: Any) -> Data:
    split = image_split(np.array([f"{row:04}" for row in range(NUM)]), np.arange(NUM) % 2, image_column(folder))
    info = image_info("x", ("a", "b"), (3, 8, 8), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    splits = {"train": split.subset(np.arange(3, NUM)), "val": split.subset(np.array([2, 0]))}
    return Data(info, splits, LoaderOptions(**{"batch_size": 4, "augment": ("crop",), "shuffle_buffer": 5} | options))


def epoch(data: Data, number: int = 0) -> list[tuple[list[int], bytes]]:
    batches = data.batches(
        "train", order_N=data.epoch_order("train", 7, number, data.loader.batch_size), augment_seed=(7, number)
    )
    return [(batch.indices_N.tolist(), batch.inputs["images"].numpy().tobytes()) for batch in batches]


def test_workers_change_no_bit(tmp_path: Path) -> None:
    single = make_data(tmp_path)
    for num_workers in (1, 3):
        parallel = make_data(tmp_path, num_workers=num_workers, persistent_workers=True)
        for number in range(2):
            assert epoch(parallel, number) == epoch(single, number)
        del parallel


def test_stored_by_reference_and_read_back(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    (tmp_path / "stored").mkdir()
    data.save(tmp_path / "stored")
    loaded = Data.load(tmp_path / "stored")
    assert loaded.loader == data.loader
    assert epoch(loaded) == epoch(data)
    assert sum(path.stat().st_size for path in (tmp_path / "stored").iterdir()) < 8000
    (tmp_path / "again").mkdir()
    loaded.save(tmp_path / "again")
    for path in (tmp_path / "stored").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_an_epoch_reads_shard_after_shard(tmp_path: Path) -> None:
    data = make_data(tmp_path, shuffle_buffer=1)
    order_N = data.epoch_order("train", 7, 0, 4)
    assert sorted(order_N) == list(range(NUM - 3))
    shards = (order_N + 3) // PER_SHARD
    assert np.count_nonzero(np.diff(shards)) == 3, "each shard once"
    everything = make_data(tmp_path, shuffle_buffer=None).epoch_order("train", 7, 0, 4)
    assert np.count_nonzero(np.diff((everything + 3) // PER_SHARD)) > 6


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


SITUATIONS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "gone": (Path.unlink, r"shard of this data set is gone: .*train-1\.tar", r"train-1\.tar is gone; put it back"),
    "truncated": (truncate, r"train-1\.tar has 3,000 bytes, and had", r"train-1\.tar: sample 000\d+ is truncated: "),
    "longer": (
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        r"train-1\.tar has .* bytes, and had .* when the data stage read it",
        r"train-1\.tar has .* bytes, and had .* when the data stage read it",
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_shard_that_is_no_longer_what_it_was(tmp_path: Path, situation: str) -> None:
    alter, when_loaded, when_read = SITUATIONS[situation]
    data = make_data(tmp_path)
    (tmp_path / "stored").mkdir()
    data.save(tmp_path / "stored")
    alter(tmp_path / "train-1.tar")
    with pytest.raises(StageError, match=when_loaded):
        read_data(tmp_path / "stored")
    for num_workers in (0, 1):
        with pytest.raises(StageError, match=when_read):
            epoch(data.with_options({"num_workers": num_workers}))


def alter_members(row: int, column: int, value: int) -> Callable[[np.ndarray], None]:
    def alter(members_N3: np.ndarray) -> None:
        members_N3[row, column] = value

    return alter


@pytest.mark.parametrize(
    "alter",
    {
        "a shard that isn't there": alter_members(0, 0, 4),
        "a shard before the first": alter_members(0, 0, -1),
        "a negative position": alter_members(0, 1, -512),
        "beyond the end": alter_members(3, 1, 1 << 40),
        "beyond all integers": alter_members(3, 1, (1 << 63) - 1),
        "a negative size": alter_members(0, 2, -1),
        "a size beyond the end": alter_members(0, 2, 100_000),
        "a huge size": alter_members(0, 2, module.MAX_MEMBER_BYTES + 1),
        "into the next member": alter_members(0, 2, 2500),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_stored_index_that_was_altered(tmp_path: Path, alter: tuple[str, Callable[[np.ndarray], None]]) -> None:
    (tmp_path / "stored").mkdir()
    make_data(tmp_path).save(tmp_path / "stored")
    path = tmp_path / "stored" / "column_0.npy"
    members_N3 = np.load(path)
    alter[1](members_N3)
    np.save(path, members_N3)
    with pytest.raises(IntegrityError, match="not a stored data set: members"):
        Data.load(tmp_path / "stored")


def test_values_in_memory_lie_in_no_blocks(tmp_path: Path) -> None:
    assert ArrayColumn(PIXELS).blocks() is None
    blocks = make_data(tmp_path).splits["val"].inputs["images"].blocks()
    assert blocks is not None and blocks.tolist() == [0, 0]
