"""Arrays in `.npz` and `.safetensors` files, or in folders of `.npy` files: a row is a sample.

Shape legend: N samples, H height, W width, C channels, T targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError, nearest
from ptpipe_data.array_paths import array_files, find_arrays
from ptpipe_data.channel_stats import channel_stats
from ptpipe_data.classes import classification, refuse_single_class, report_absent
from ptpipe_data.config import ClassesConfig
from ptpipe_data.duplicates import report_shared
from ptpipe_data.masks import count_classes
from ptpipe_data.named_labels import numbered, refuse_unseen
from ptpipe_data.padded_tokens import describing_tokens, tokens_info, without_padding
from ptpipe_data.paths import dataset_name, id_prefixes
from ptpipe_data.splitting import draw_missing_splits
from ptpipe_data.tasks import regression
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Column,
    ColumnInfo,
    Data,
    DatasetInfo,
    ImageInfo,
    MultiLabel,
    Segmentation,
    Split,
    Task,
    Unlabeled,
)

if TYPE_CHECKING:
    from ptpipe_data.config import ArraysConfig
    from ptpipe_data.python_config import PythonDataConfig

_TEST_FRACTION = 0.2
_DTYPES = {"float16": "float32", "float64": "float32"}
"""What is stored as something else than it is."""
_MAX_UNNAMED = 100_000
"""Classes without names that a few samples may have: those of a network that was trained with more."""
_CHANNELS = (1, 3)
"""Of images."""
_SEEN_ROWS = 1000
_INPUT_DTYPES = ("float32", "int64", "int32", "uint8", "bool")


def load_arrays(config: ArraysConfig, ctx: Context) -> Data:
    """Return the data set. Statistics are those of train alone."""
    paths = {split: find_arrays(path) for split, path in config.paths.items()}
    prefixes = id_prefixes(paths, config.paths)
    sources = {split: Source.read(path, prefixes[split]) for split, path in paths.items()}
    return data_of(sources, Columns(config, config.inputs, config.target), ctx, dataset_name(paths["train"]))


@dataclass(frozen=True)
class Columns:
    """Which arrays are what."""

    config: ArraysConfig | PythonDataConfig
    """Names the target and the images, and has the other options."""
    inputs: Sequence[str]
    target: str | None
    """None: the data set is unlabeled."""


def data_of(sources: Mapping[str, Source], columns: Columns, ctx: Context, name: str) -> Data:
    """Return the data set `name` of these splits; `train` must be among them, others may be."""
    are_names_given = columns.config.names is not None
    sources, columns = numbered(sources, columns)
    config = columns.config
    found = {split: source.split(columns) for split, source in sources.items()}
    found, infos = _with_tokens(sources, found, columns, ctx)
    for split, of in found.items():
        _check_like_train(sources[split].name, of, sources["train"].name, found["train"])
    splits = draw_missing_splits(found, config, ctx.seed, test_fraction=_TEST_FRACTION)
    if config.names is not None and not are_names_given:
        refuse_unseen(splits, config.names)
    task = _task(config, found, splits["train"], ctx)
    for own in columns.inputs:
        if own in task.targets or own in [spec.name for spec in task.outputs]:
            raise StageError(f"{sources['train'].name}: an input can't be called {own!r}, as the task's own tensor is")
    splits = {
        split: Split(of.ids, of.inputs, dict(zip(task.targets, of.targets.values(), strict=True)))
        for split, of in splits.items()
    }
    report_shared(splits, ctx, may_repeat=not config.images and not _have_fractions(splits["train"].inputs.values()))
    infos = {own: infos.get(own) or _info(own, config, splits["train"].inputs[own]) for own in columns.inputs}
    return Data(DatasetInfo(name, infos, task), splits, config.loader_options())


def _with_tokens(
    sources: Mapping[str, Source], found: Mapping[str, Split], columns: Columns, ctx: Context
) -> tuple[dict[str, Split], dict[str, ColumnInfo]]:
    """Return the splits with tokens without padding, and the facts about these inputs."""
    tokens = columns.config.tokens
    for own in tokens:
        if own not in columns.inputs:
            raise StageError(f"tokens: {own!r} is not among the inputs {', '.join(columns.inputs)}")
    splits = {name: without_padding(sources[name].name, split, tokens) for name, split in found.items()}
    for own in describing_tokens(found["train"], splits["train"], tokens):
        ctx.notice(
            f"{sources['train'].name}: {own} has one value at all padding of {', '.join(tokens)} and is not in "
            "`tokens`, so its batches are not cut to the same length: name it there, too, if it describes the tokens, "
            "as a mask"
        )
    first = np.zeros(1, dtype=np.int64)
    lengths = {own: max(split.inputs[own].take(first).shape[1] for split in found.values()) for own in tokens}
    for own, length in lengths.items():
        lengths_N = splits["train"].inputs[own].lengths
        if lengths_N is not None and lengths_N.min() == length > 1:
            ctx.notice(
                f"{sources['train'].name}: no row of {own} ends with the padding {tokens[own].padding_id}, so each has "
                f"{length} tokens: pad on the right, or set its padding_id"
            )
            break
    return splits, {own: tokens_info(own, splits, tokens[own], lengths[own]) for own in tokens}


def _have_fractions(columns: Iterable[Column]) -> bool:
    first = (column.take(np.arange(min(len(column), _SEEN_ROWS))) for column in columns)
    return any(rows.dtype.kind == "f" and (rows % 1 > 0).any() for rows in first)


@dataclass(frozen=True)
class Source:
    """The arrays of one split's file, folder or function. Errors name it, the array and the row, counted from 0."""

    name: str
    arrays: Mapping[str, npt.NDArray[Any]]
    prefix: str
    """What the ids of its samples begin with."""

    @classmethod
    def read(cls, path: Path, prefix: str) -> Source:
        """Open a file or folder. Raises StageError where it holds anything but arrays of numbers."""
        try:
            return cls(str(path), _opened(path), prefix)
        except Exception as error:  # NumPy parses headers with Python's own parser, zip files raise anything
            text = " ".join(str(error).split())[:300]
            remedy = ": save numbers, or names as `array.astype(str)`" if "allow_pickle" in text else ""
            raise StageError(f"{path} can't be read: {text}{remedy}") from error

    def split(self, columns: Columns) -> Split:
        """Return all samples, with ids `PREFIX/ROW`."""
        config, target = columns.config, columns.target
        arrays = {name: self._array(name) for name in (*columns.inputs, *filter(None, [target]))}
        arrays |= {name: _with_channels_last(arrays[name]) for name in config.images}
        for name in columns.inputs:
            _check_input(self, name, arrays[name], is_image=name in config.images)
        num_rows = {name: len(array) for name, array in arrays.items()}
        if len(set(num_rows.values())) > 1:
            sizes = ", ".join(f"{name} {num}" for name, num in num_rows.items())
            raise StageError(f"{self.name}: arrays have different numbers of rows: {sizes}")
        ids = np.array([f"{self.prefix}/{row}" for row in range(max(num_rows.values()))])
        targets = {} if target is None else {target: ArrayColumn(_target(self, config, arrays.pop(target)))}
        return Split(ids, {name: ArrayColumn(array) for name, array in arrays.items()}, targets)

    def _array(self, name: str) -> npt.NDArray[Any]:
        """Return an array, float32 where it is of another precision. Raises StageError where it is not finite."""
        if name not in self.arrays:
            close = nearest(name, self.arrays)
            hint = f"did you mean {close!r}?" if close else f"it has {', '.join(self.arrays) or 'none'}"
            raise StageError(f"{self.name} has no array {name!r} ({hint})")
        array = self.arrays[name]
        if not name.isidentifier():
            raise StageError(f"{self.name}: the array {name!r} needs a name of letters, digits and underscores")
        if array.ndim == 0 or array.dtype.kind not in "buif":
            remedy = f": save names as `{name}.astype(str)`" if array.dtype.kind == "S" else ""
            raise StageError(
                f"{self.name}: {name} holds {array.dtype} of shape {array.shape}, not rows of numbers{remedy}"
            )
        if 0 in array.shape:
            what = "values" if len(array) else "rows"
            raise StageError(f"{self.name}: {name}, of shape {array.shape}, has no {what}")
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):  # infinity is refused below
                array = array.astype(_DTYPES.get(str(array.dtype), str(array.dtype)), copy=False)
            finite_N = np.isfinite(array).reshape(len(array), -1).all(axis=1)
            if not finite_N.all():
                row = int(finite_N.argmin())
                raise StageError(f"{self.name}: row {row} of {name} is not finite in float32: mend it, or leave it out")
        return array


def _opened(path: Path) -> dict[str, npt.NDArray[Any]]:
    if path.is_dir():
        return {file.stem: np.lib.format.open_memmap(file, mode="r") for file in array_files(path)}
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return dict(load_file(path))
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _with_channels_last(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return bytes as (N, H, W, C) that are (N, H, W) or (N, C, H, W), and anything else as it is."""
    if pixels.dtype != np.uint8:
        return pixels
    if pixels.ndim == 3:
        return pixels[..., np.newaxis]
    if pixels.ndim == 4 and pixels.shape[3] not in _CHANNELS and pixels.shape[1] in _CHANNELS:
        return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    return pixels


def _check_input(source: Source, name: str, array: npt.NDArray[Any], *, is_image: bool) -> None:
    found = f"{source.name}: {name} holds {array.dtype} of shape {array.shape}"
    if is_image and (array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] not in _CHANNELS):
        raise StageError(f"{found}, not pixels: uint8 (N, height, width), with 1 or 3 channels as last or second axis")
    if str(array.dtype) not in _INPUT_DTYPES:
        remedy = f"`{name}.astype('float32')` where they are measured, `{name}.astype('int64')` where they are ids"
        raise StageError(f"{found}; inputs are {', '.join(_INPUT_DTYPES)}: save {remedy}")


def _target(source: Source, config: ArraysConfig | PythonDataConfig, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the target as its task takes it. Raises StageError where its type or shape is another."""
    found = f"{source.name}: {config.target} holds {array.dtype} of shape {array.shape}"
    match config.task:
        case "classification":
            if array.shape not in ((len(array),), (len(array), 1)) or array.dtype.kind not in "biu":
                is_one_hot = array.ndim == 2 and array.shape[1] > 1
                remedy = "argmax(1)` of one-hot rows" if is_one_hot else "astype(int)`"
                raise StageError(
                    f"{found}; a classification's target are integers, truth values or names (N,): give "
                    f"`{config.target}.{remedy}"
                )
            return array.reshape(len(array)).astype(np.int64)
        case "multi_label":
            if array.ndim != 2:
                raise StageError(f"{found}; a multi-label task's target is 0 or 1, (N, labels)")
            return array.astype(np.float32)
        case "segmentation":
            if array.ndim != 3 or array.dtype.kind not in "biu":
                raise StageError(f"{found}; a segmentation's target are integers or truth values (N, height, width)")
            _check_pixels(source, config, array)
            return array.astype(np.uint8, copy=False)
        case "regression":
            return array.reshape(len(array), -1, *array.shape[2:]).astype(np.float32, copy=False)
    raise AssertionError(config.task)


def _check_pixels(source: Source, config: ArraysConfig | PythonDataConfig, masks_NHW: npt.NDArray[Any]) -> None:
    """Raise StageError where a pixel is no class."""
    num_classes = len(config.names) if config.names else 255
    for row, mask_HW in enumerate(masks_NHW):  # one at a time: all of them may be more than memory
        wrong_HW = (mask_HW != config.ignore) & ((mask_HW < 0) | (mask_HW >= num_classes))
        if wrong_HW.any():
            raise StageError(
                f"{source.name}: row {row} of {config.target} has pixels of {mask_HW[wrong_HW][0]}; classes are "
                f"numbered 0 to {num_classes - 1}, and {config.ignore} is ignored (option `ignore`)"
            )


def _check_like_train(name: str, split: Split, train_name: str, train: Split) -> None:
    """Raise StageError where values of a sample are of another type or shape than those of train."""
    for column, values in split.columns.items():
        if values.lengths is not None:  # texts may have any
            continue
        row, train_row = (of.take(np.zeros(1, dtype=np.int64)) for of in (values, train.columns[column]))
        if (row.dtype, row.shape) != (train_row.dtype, train_row.shape):
            found, wanted = (f"{of.dtype} of shape (N, {', '.join(map(str, of.shape[1:]))})" for of in (row, train_row))
            raise StageError(f"{name}: {column} holds {found}, and {wanted} in {train_name}: both must be the same")


def _task(config: ArraysConfig | PythonDataConfig, found: Mapping[str, Split], train: Split, ctx: Context) -> Task:
    if config.task == "unlabeled":
        return Unlabeled()
    (target,) = train.targets
    values = train.targets[target].values()
    if config.task in ("classification", "segmentation"):
        names = config.names or _numbers(config, [of.targets[target].values() for of in found.values()])
    if config.task == "classification":
        in_range_N = values[(values >= 0) & (values < len(names))]  # others are refused by the task
        if len(in_range_N) == len(values):
            refuse_single_class("train", names)
        report_absent(np.bincount(in_range_N, minlength=len(names)), names, ctx)
        return classification(names, config.classes or ClassesConfig(), in_range_N)
    if config.task == "segmentation":
        count_classes(train.targets[target], names, config.ignore, ctx)
        return Segmentation(class_names=names, shape_HW=values.shape[1:], ignore=config.ignore)
    names = config.names or tuple(map(str, range(values.shape[1])))
    if len(names) != values.shape[1]:
        raise StageError(f"names: {len(names)} names for the {values.shape[1]} columns of {target}")
    if config.task == "multi_label":
        return MultiLabel(label_names=names)
    return regression(names, config, values, config.data_range)


def _numbers(config: ArraysConfig | PythonDataConfig, targets: Sequence[npt.NDArray[Any]]) -> tuple[str, ...]:
    """Return the names of classes that have none: 0, 1, 2, ..."""
    ignored = config.ignore if config.task == "segmentation" else -1
    largest = max(int(np.max(values, where=values != ignored, initial=0)) for values in targets)
    if largest > max(_MAX_UNNAMED, 2 * sum(map(len, targets))):
        raise StageError(
            f"{config.target} has the class {largest}: classes are numbered 0, 1, 2, ..., and so many would have no "
            "samples; number those that occur"
        )
    return tuple(map(str, range(1 + largest)))


def _info(name: str, config: ArraysConfig | PythonDataConfig, column: Column) -> ColumnInfo:
    row = column.take(np.zeros(1, dtype=np.int64))
    if name not in config.images:
        return ArrayInfo.model_validate({"dtype": str(row.dtype), "shape": row.shape[1:]})
    mean, std = channel_stats(column)
    _, height, width, channels = row.shape
    return ImageInfo(shape_CHW=(channels, height, width), mean=mean, std=std)
