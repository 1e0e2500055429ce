"""Write the splits of any data set as tar shards: `data.shards` reads them back.

Shape legend: N samples of a split, B of a batch.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.shards import Description, SplitName
from ptpipe_data.shards_paths import DESCRIPTION
from ptpipe_data.tar import MAX_NAME
from ptpipe_torch import Column, Data, ImageFileColumn, RaggedColumn, Split
from ptpipe_torch.data.column import flatten
from ptpipe_torch.data.image_members import AnyFormat, ImageMembers
from ptpipe_torch.data.images import FORMATS, open_image
from ptpipe_torch.data.shards import ArrayMembers, RaggedMembers, TarColumn, write_npy
from ptpipe_torch.files import open_regular

SPLITS: tuple[SplitName, ...] = get_args(SplitName)
_BATCH = 64
_IMAGE_SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
_BLOCK = 512

Encode: TypeAlias = Callable[[npt.NDArray[np.int64]], Iterable[tuple[str, bytes]]]
"""From rows of a column to the suffix and the content of each one's member."""


@dataclass(frozen=True)
class ShardSize:
    """When a shard is full: by whichever comes first."""

    num_samples: int | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class Written:
    """What was written of a split."""

    split: str
    num_samples: int
    num_shards: int
    num_bytes: int


def write_shards(data: Data, folder: Path, size: ShardSize, seed: int) -> list[Written]:
    """Write the splits of a data set into a new folder, as a whole or not at all.

    The samples of train are shuffled once, because an epoch shuffles neighbours alone: shards of one class each would
    make batches of one class. The same data set and seed give the same bytes.

    Raises StageError where the folder exists or can't be written, or a file of the data set can't be read.
    """
    if folder.exists():
        raise StageError(f"{folder} exists already: remove it, or choose another folder")
    formats = {name: _format_of(name, data) for name in data.info.columns}
    with _new_folder(folder) as temporary:
        written = [_write_split(data, split, temporary, size, seed) for split in SPLITS]
        for name, content in data.assets.items():
            (temporary / name).write_bytes(content)
        (temporary / DESCRIPTION).write_text(_description(data, formats), encoding="utf-8")
        for path in temporary.iterdir():
            _sync(path)
    return written


def _write_split(data: Data, split: str, folder: Path, size: ShardSize, seed: int) -> Written:
    samples = data.splits[split]
    order_N = np.random.default_rng(seed).permutation(len(samples)) if split == "train" else np.arange(len(samples))
    writer = _ShardWriter(folder, split, size)
    with closing(writer):
        for sample in _encoded(samples, order_N):
            writer.add(sample)
    return writer.written


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name when the `with` ends without error, and is deleted otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(6)}")
    try:
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        temporary.rename(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write, which has a descriptor alone
            raise StageError(f"{folder} can't be written: {error.strerror or error}") from error
        raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _description(data: Data, formats: Mapping[str, AnyFormat]) -> str:
    return Description(
        name=data.info.name,
        inputs={name: info.to_json() for name, info in data.info.inputs.items()},
        task=data.info.task.to_json(),
        columns=dict(formats),
        splits={split: len(data.splits[split]) for split in SPLITS},
        assets={name: hashlib.sha256(content).hexdigest() for name, content in data.assets.items()},
    ).model_dump_json(indent=1)


def _format_of(name: str, data: Data) -> AnyFormat:
    """Return how a column is written: the same in all splits."""
    columns = {split: flatten(data.splits[split].columns[name])[0] for split in SPLITS if len(data.splits[split])}
    formats = {split: _format(column) for split, column in columns.items()}
    if not formats:
        raise StageError(f"{data.info.name} has no samples")
    if len(set(formats.values())) > 1:
        raise StageError(f"{name} differs from split to split: {', '.join(f'{s}: {f}' for s, f in formats.items())}")
    return next(iter(formats.values()))


def _format(column: Column) -> AnyFormat:
    if isinstance(column, TarColumn):
        assert isinstance(column.format, ImageMembers | ArrayMembers | RaggedMembers)
        return column.format
    if isinstance(column, ImageFileColumn):
        return ImageMembers.model_validate(asdict(column.decoder))
    if isinstance(column, RaggedColumn):
        dtype = column.values_V.dtype.name
        return RaggedMembers.model_validate({"dtype": dtype, "padding": column.padding, "length": column.length})
    row = column.take(np.zeros(1, dtype=np.int64))
    return ArrayMembers.model_validate({"dtype": row.dtype.name, "shape": row.shape[1:]})


def _encoder(column: Column) -> Encode:
    """Return what makes members of rows: files are copied as they are."""
    source, positions_N = flatten(column)
    if isinstance(source, TarColumn):
        return lambda rows_B: _copied_members(source, positions_N[rows_B])
    if isinstance(source, ImageFileColumn):
        return lambda rows_B: (_copied_file(source.path(position)) for position in positions_N[rows_B])
    if isinstance(source, RaggedColumn):
        offsets_N = source.offsets_N
        return lambda rows_B: (
            (".npy", write_npy(source.values_V[offsets_N[position] : offsets_N[position + 1]]))
            for position in positions_N[rows_B]
        )
    return lambda rows_B: ((".npy", write_npy(row)) for row in source.take(positions_N[rows_B]))


def _copied_members(column: TarColumn, positions_B: npt.NDArray[np.int64]) -> Sequence[tuple[str, bytes]]:
    is_image = isinstance(column.format, ImageMembers)
    members = sorted(column.members.read(positions_B))  # by row
    return [(_suffix_of(content, name) if is_image else ".npy", content) for _, name, content in members]


def _copied_file(path: Path) -> tuple[str, bytes]:
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise StageError(f"{path} can't be read: {error.strerror}") from error
    suffix = path.suffix.lower()
    return suffix if suffix in _IMAGE_SUFFIXES else _suffix_of(content, str(path)), content


def _suffix_of(content: bytes, name: str) -> str:
    """Return a suffix of an encoded image's format. Raises StageError, with its name, for what is none."""
    with open_image(BytesIO(content), name, sys.maxsize) as image:
        return FORMATS[image.format or ""][0]


def _encoded(split: Split, order_N: npt.NDArray[np.int64]) -> Iterator[list[tuple[str, bytes]]]:
    """Yield names and contents of each sample's members."""
    encoders = {name: _encoder(column) for name, column in split.columns.items()}
    for start in range(0, len(order_N), _BATCH):
        rows_B = order_N[start : start + _BATCH]
        columns = {name: encode(rows_B) for name, encode in encoders.items()}
        keys = map(_key, split.ids[rows_B].tolist())
        for key, *members in zip(keys, *columns.values(), strict=True):
            yield [(f"{key}.{name}{suffix}", content) for name, (suffix, content) in zip(columns, members, strict=True)]


def _key(id_: str) -> str:
    """Return a sample's id as a path without dots, which end a key in WebDataset's convention; `unquote` undoes it."""
    path = "".join(letter if letter.isprintable() and letter not in ".%" else _percent(letter) for letter in id_)
    return path if all(path.split("/")) else path.replace("/", _percent("/"))


def _percent(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode())


class _ShardWriter:
    """Writes the shards of a split, one after the other."""

    def __init__(self, folder: Path, split: str, size: ShardSize) -> None:
        self._folder, self._split, self._size = folder, split, size
        self._tar: tarfile.TarFile | None = None
        self._in_shard = self._bytes_in_shard = 0
        self.num_samples = self._num_shards = self._num_bytes = 0

    def add(self, members: Sequence[tuple[str, bytes]]) -> None:
        num_bytes = sum(_BLOCK + -(-len(content) // _BLOCK) * _BLOCK for _, content in members)
        if self._tar is None or self._is_full(num_bytes):
            self._finish()
            path = self._folder / f"{self._split}-{self._num_shards:06}.tar"
            self._tar = tarfile.open(path, "x", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # closed by `_finish`
            self._num_shards += 1
        for name, content in members:
            if len(name) > MAX_NAME:
                raise StageError(f"{name[:100]} ... is longer than {MAX_NAME} characters: shorten the ids of samples")
            header = tarfile.TarInfo(name)  # without time, owner or group, which would make other bytes of it
            header.size = len(content)
            self._tar.addfile(header, BytesIO(content))
        self._in_shard, self._bytes_in_shard = self._in_shard + 1, self._bytes_in_shard + num_bytes
        self.num_samples += 1

    def _is_full(self, num_bytes: int) -> bool:
        size = self._size
        is_full = size.num_samples is not None and self._in_shard >= size.num_samples
        return is_full or (size.num_bytes is not None and self._bytes_in_shard + num_bytes > size.num_bytes)

    def _finish(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._num_bytes += Path(str(self._tar.name)).stat().st_size
        self._tar, self._in_shard, self._bytes_in_shard = None, 0, 0

    def close(self) -> None:
        """End the last shard."""
        self._finish()

    @property
    def written(self) -> Written:
        """What was written, once it is closed."""
        return Written(self._split, self.num_samples, self._num_shards, self._num_bytes)
