"""A data set's folder in the store: JSON, and arrays as `.npy` files that are memory-mapped when read.

Splits drawn from the same samples (val and calibration from the training images) share the files of their columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt

from ptpipe import IntegrityError, StageError
from ptpipe_torch.data.column import ArrayColumn, Column, RaggedColumn, SubsetColumn, flatten
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.data.data import LOADING_OPTIONS, LoaderOptions, Split
from ptpipe_torch.data.dataset_info import DatasetInfo
from ptpipe_torch.data.image_members import AnyFormat, StoredSide, StoredSize
from ptpipe_torch.data.images import ImageFileColumn
from ptpipe_torch.data.shards import MAX_LENGTH, RaggedMembers, Shard, TarColumn, TarMembers, changed
from ptpipe_torch.task.task import Task

if TYPE_CHECKING:
    from ptpipe_torch.data.data import Data

_RECORD = "data.json"
_CHUNK_BYTES = 32 << 20
_MAX_BATCH_VALUES = 1 << 28
"""Of rows that are padded: a few bytes may describe rows of any length."""
_NUMBERS = "buif"
"""`numpy.dtype.kind` of the arrays that hold values."""


def _not_the_record(name: str) -> str:
    if name == _RECORD:
        raise ValueError(f"{name!r} can't be the name of an asset")
    return name


_ASSET = r"^[a-z][a-z0-9_]{0,99}\.(json|txt)$"
AssetName: TypeAlias = Annotated[str, Field(pattern=_ASSET), AfterValidator(_not_the_record)]


class _Part(BaseModel):
    """A part of the record: the bounds keep a record that somebody else wrote from starting a thousand processes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Info(_Part):
    name: str
    inputs: dict[str, dict[str, Any]] = Field(min_length=1, max_length=1000)
    task: dict[str, Any]


class _Loader(_Part):
    batch_size: int = Field(ge=1, le=1_000_000)
    augment: tuple[str, ...]
    batch_by_length: bool = False
    shuffle_buffer: int | None = Field(default=None, ge=1)


class _Column(_Part):
    kind: Literal["array", "image_files", "ragged", "tar"]
    root: str = ""
    size: StoredSize = 1
    resize: StoredSide | None = 1
    channels: Literal[1, 3] = 3
    max_pixels: int = Field(default=1, ge=1)
    padding: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    length: int | None = Field(default=None, ge=1, le=MAX_LENGTH)
    shards: tuple[Shard, ...] = ()
    format: AnyFormat | None = None


class _View(_Part):
    """Where the rows of one split's column are."""

    column: NonNegativeInt
    positions: NonNegativeInt


class _Record(_Part):
    info: _Info
    loader: _Loader
    columns: tuple[_Column, ...]
    splits: dict[Literal["train", "val", "test", "calibration"], dict[str, _View]] = Field(min_length=1)
    """Views by the names of the columns."""
    assets: tuple[AssetName, ...] = ()
    """Names of files."""


def write_data(data: Data, folder: Path) -> None:
    """Write a data set into an empty folder, without rows that no split uses."""
    flat = {
        split: {name: flatten(column) for name, column in samples.columns.items()}
        for split, samples in data.splits.items()
    }
    every = [view for views in flat.values() for view in views.values()]
    columns = list({id(column): column for column, _ in every}.values())
    used = [np.unique(np.concatenate([rows for of, rows in every if of is column])) for column in columns]
    numbers = {id(column): number for number, column in enumerate(columns)}
    positions = _PositionFiles(folder)

    def view(column: Column, rows_N: npt.NDArray[np.int64]) -> dict[str, int]:
        number = numbers[id(column)]
        return {"column": number, "positions": positions.write(np.searchsorted(used[number], rows_N))}

    for split, samples in data.splits.items():
        np.save(folder / f"{split}.ids.npy", _encoded(samples.ids))
    record = {
        "info": {
            "name": data.info.name,
            "inputs": {name: info.to_json() for name, info in data.info.inputs.items()},
            "task": data.info.task.to_json(),
        },
        "loader": {name: value for name, value in asdict(data.loader).items() if name not in LOADING_OPTIONS},
        "columns": [_write_column(column, used[n], _column_file(folder, n)) for n, column in enumerate(columns)],
        "splits": {
            split: {name: view(*flat_view) for name, flat_view in views.items()} for split, views in flat.items()
        },
        "assets": [*data.assets],
    }
    for name, content in data.assets.items():
        (folder / name).write_bytes(content)
    (folder / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


class _PositionFiles:
    """Writes arrays of positions, equal ones (of a split's images and labels) once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[bytes, int] = {}

    def write(self, positions_N: npt.NDArray[np.int64]) -> int:
        """Return the number of the file."""
        digest = hashlib.sha256(positions_N.tobytes()).digest()
        if digest not in self._numbers:
            self._numbers[digest] = len(self._numbers)
            np.save(_positions_file(self._folder, self._numbers[digest]), positions_N)
        return self._numbers[digest]


def _positions_file(folder: Path, number: int) -> Path:
    return folder / f"positions_{number}.npy"


def _column_file(folder: Path, number: int) -> Path:
    return folder / f"column_{number}.npy"


def _offsets_file(column_file: Path) -> Path:
    return column_file.with_suffix(".offsets.npy")


def _keys_file(column_file: Path) -> Path:
    return column_file.with_suffix(".keys.npy")


def asset_names(folder: Path) -> tuple[str, ...]:
    """Return the names of a stored data set's assets. Raises IntegrityError for a record that is none."""
    try:
        return _Record.model_validate_json((folder / _RECORD).read_bytes()).assets
    except (OSError, ValueError) as error:
        raise IntegrityError(f"not a stored data set: {' '.join(str(error).split())[:300]}") from error


def read_data(folder: Path) -> tuple[DatasetInfo, dict[str, Split], LoaderOptions, dict[str, bytes]]:
    """Inverse of `write_data`.

    Raises StageError where the original folder of an image folder is missing, IntegrityError for anything but a data
    set's folder, and where a column's or the task's plugin is not loaded.
    """
    try:
        record = _Record.model_validate_json((folder / _RECORD).read_bytes())
        inputs = {name: ColumnInfo.from_json(content) for name, content in record.info.inputs.items()}
        info = DatasetInfo(record.info.name, inputs, Task.from_json(record.info.task))
        check_names(info)
        columns = [_read_column(described, _column_file(folder, n)) for n, described in enumerate(record.columns)]
        splits = {
            str(split): _read_split(columns, folder, split, views, info) for split, views in record.splits.items()
        }
        _check_batches(columns, record.loader.batch_size)
        assets = {name: (folder / name).read_bytes() for name in record.assets}
    except (StageError, IntegrityError):
        raise
    except Exception as error:  # NumPy parses the headers of arrays with Python's own parser
        raise IntegrityError(f"not a stored data set: {' '.join(str(error).split())[:300]}") from error
    return info, splits, LoaderOptions(**dict(record.loader)), assets


def check_names(info: DatasetInfo) -> None:
    """Raise ValueError where an input has no name that a network's argument may have, or another column's."""
    others = {*info.targets, *(spec.name for spec in info.task.outputs)}
    for name in info.inputs:
        if not name.isidentifier() or name in others:
            raise ValueError(f"{name!r} can't be the name of an input")


def _write_column(column: Column, used: npt.NDArray[np.int64], path: Path) -> dict[str, Any]:
    if isinstance(column, ImageFileColumn):
        np.save(path, column.paths_N[used])
        numbers = {name: getattr(column, name) for name in ("size", "resize", "channels", "max_pixels")}
        return {"kind": "image_files", "root": str(column.root), **numbers}
    if isinstance(column, TarColumn):
        return _write_tar_column(column, used, path)
    if isinstance(column, RaggedColumn):
        chosen = _rows_of(column, used)
        np.save(path, chosen.values_V)
        np.save(_offsets_file(path), chosen.offsets_N)
        return {"kind": "ragged", "padding": column.padding, "length": column.length}
    if isinstance(column, ArrayColumn) and len(used) == len(column):
        np.save(path, column.array_N)
        return {"kind": "array"}
    row = column.take(used[:1])
    chunk = max(1, _CHUNK_BYTES // max(1, row[:1].nbytes))
    array_N = np.lib.format.open_memmap(path, "w+", row.dtype, (len(used), *row.shape[1:]))
    for start in range(0, len(used), chunk):
        rows = column.take(used[start : start + chunk])
        if rows.shape[1:] != row.shape[1:]:
            raise StageError(
                f"{type(column).__name__}.take() returned rows of shape {row.shape[1:]}, and then of {rows.shape[1:]}: "
                "a stored column has rows of one shape, so pad them all alike, or make it a RaggedColumn if a row is a "
                "list of numbers"
            )
        array_N[start : start + chunk] = rows
    array_N.flush()
    return {"kind": "array"}


def _write_tar_column(column: TarColumn, used: npt.NDArray[np.int64], path: Path) -> dict[str, Any]:
    members = column.members.subset(used)
    np.save(path, members.members_N3)
    np.save(_keys_file(path), members.keys_N)
    shards = [shard.model_dump() for shard in members.shards]
    return {"kind": "tar", "root": str(members.root), "shards": shards, "format": column.format.model_dump(mode="json")}


def _read_column(described: _Column, path: Path) -> Column:
    if described.kind == "array":
        # Copy-on-write: torch wants writable arrays, and the file is read-only.
        return ArrayColumn(_read_array(path, _NUMBERS, mmap_mode="c"))
    if described.kind == "ragged":
        values_V = _read_array(path, _NUMBERS, 1, mmap_mode="c")
        offsets_N = _read_array(_offsets_file(path), "i", 1).astype(np.int64)
        _check_offsets(offsets_N, len(values_V), described.length or MAX_LENGTH)
        if values_V.dtype.kind != "f":
            np.array(described.padding, dtype=values_V.dtype)  # raises OverflowError
        return RaggedColumn(values_V, offsets_N, described.padding, described.length)
    root = Path(described.root)
    if described.kind == "tar":
        return _read_tar_column(described, root, path)
    if not root.is_dir():
        raise StageError(
            f"the images of this data set are gone: {root} is not there; put it back, or rerun the data stage"
        )
    numbers = (described.size, described.resize, described.channels, described.max_pixels)
    return ImageFileColumn(root, _read_array(path, "S", 1), *numbers)


def _read_tar_column(described: _Column, root: Path, path: Path) -> TarColumn:
    if described.format is None:
        raise ValueError("a column of shards has no format")
    for shard in described.shards:
        try:
            size_bytes = (root / shard.name).stat().st_size
        except OSError as error:
            raise StageError(
                f"a shard of this data set is gone: {root / shard.name} is not there; put it back, or rerun the data "
                "stage"
            ) from error
        if size_bytes != shard.size_bytes:
            raise StageError(changed(root / shard.name, size_bytes, shard))
    keys_N, members_N3 = _read_array(_keys_file(path), "S", 1), _read_array(path, "i", 2)
    column = TarColumn(TarMembers(root, described.shards, keys_N, members_N3), described.format)
    column.check()
    return column


def _rows_of(column: RaggedColumn, used: npt.NDArray[np.int64]) -> RaggedColumn:
    """Return these rows alone, in this order."""
    if len(used) == len(column):
        return column
    offsets_N = np.concatenate([[0], np.cumsum(column.lengths[used])])
    shifts_N = column.offsets_N[used] - offsets_N[:-1]
    positions_V = np.arange(offsets_N[-1]) + np.repeat(shifts_N, column.lengths[used])
    return RaggedColumn(column.values_V[positions_V], offsets_N, column.padding, column.length)


def _check_offsets(offsets_N: npt.NDArray[np.int64], num_values: int, max_length: int) -> None:
    lengths_N = np.diff(offsets_N)
    is_whole = len(offsets_N) > 0 and offsets_N[0] == 0 and offsets_N[-1] == num_values
    if not is_whole or lengths_N.min(initial=0) < 0 or lengths_N.max(initial=0) > max_length:
        raise ValueError("the rows of a ragged column don't fit its values")


def _check_batches(columns: Sequence[Column], batch_size: int) -> None:
    for column in columns:
        longest = _longest_row(column)
        if longest * min(batch_size, len(column)) > _MAX_BATCH_VALUES:
            raise ValueError(f"a batch of {batch_size} rows of {longest} values is too large")


def _longest_row(column: Column) -> int:
    """Return what a column's rows may be padded to; 0 where they are not."""
    match column:
        case RaggedColumn():
            return column.length or int(column.lengths.max(initial=0))
        case TarColumn(format=RaggedMembers() as format_):
            return format_.length or int(format_.lengths(column.members.members_N3[:, 2]).max(initial=0))
    return 0


def _read_split(
    columns: Sequence[Column], folder: Path, split: str, views: Mapping[str, _View], info: DatasetInfo
) -> Split:
    if views.keys() != info.columns.keys():
        raise ValueError(f"{split} has the columns {', '.join(views)}")
    read = {
        name: SubsetColumn(columns[view.column], _read_array(_positions_file(folder, view.positions), "i", 1))
        for name, view in views.items()
    }
    ids = _read_array(folder / f"{split}.ids.npy", "S", 1)
    for name, column in read.items():
        if len(column) != len(ids):
            raise ValueError(f"ids and {name} of {split} differ in number")
        if len(ids) and not 0 <= column.positions_N.min() <= column.positions_N.max() < len(column.source):
            raise ValueError(f"{split} has positions outside of the {len(column.source)} rows of {name}")
    inputs, targets = ({name: read[name] for name in side} for side in (info.inputs, info.targets))
    return Split(_decoded(ids), inputs, targets)


def _read_array(
    path: Path, kinds: str, num_axes: int | None = None, mmap_mode: Literal["c"] | None = None
) -> npt.NDArray[Any]:
    """Read an array of a file's size. `kinds`: letters of `numpy.dtype.kind`."""
    # Mapped first: a header may announce any size, which would be allocated. Not np.load: it also reads other formats.
    with np.errstate(over="raise"):  # of its size
        array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="c")
    if array.dtype.kind not in kinds or array.ndim != (num_axes or array.ndim) or not array.ndim:
        raise ValueError(f"{path.name} holds {array.dtype} {array.shape}")
    return array if mmap_mode else np.array(array)


def _encoded(ids: npt.NDArray[np.str_]) -> npt.NDArray[np.bytes_]:
    # Of no ids at all, NumPy 1 makes float64.
    return np.char.encode(ids, "utf-8") if len(ids) else np.empty(0, np.dtype("S1"))


def _decoded(ids: npt.NDArray[np.bytes_]) -> npt.NDArray[np.str_]:
    try:
        return ids.astype(np.str_)  # many times faster than decoding, but ASCII only
    except UnicodeDecodeError:
        return np.char.decode(ids, "utf-8")
