"""Data sets that a function in a Python file of the user's returns: torch Datasets and arrays, read once.

Shape legend: N samples of a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, TensorDataset

from ptpipe import Context, StageError, nearest
from ptpipe_data.arrays import Columns, Source, data_of
from ptpipe_data.paths import dataset_name
from ptpipe_torch import Data, FunctionRef, Task
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.paths import find_path
from ptpipe_torch.python_file import load_function, own_errors, seeded_everywhere
from ptpipe_torch.read_files import reads_recorded
from ptpipe_torch.task.own_functions import OwnFunction, OwnFunctionsTask

if TYPE_CHECKING:
    from ptpipe_data.python_config import PythonDataConfig

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

_SPLITS = ("train", "val", "test")
_NUM_READ_TWICE = 8
_PROGRESS_EVERY = 256
_MAX_LISTED_INPUTS = 2


def load_data(config: PythonDataConfig, ctx: Context) -> Data:
    """Implement `data.python`."""
    file = Path(config.file).expanduser().absolute()
    with seeded_everywhere(ctx.seed), reads_recorded(ctx, map(find_path, config.reads)):
        returned = load_function(file, config.function)(**config.arguments)
        found = _splits(returned, f"{file.name}: {config.function}()")
        readers = {name: _Reader(file, f"{config.function}(), {name}", config, ctx) for name in found}
        arrays = {name: readers[name].read(dataset) for name, dataset in found.items()}
    target = readers["train"].target
    required = [("images", name) for name in config.images] + ([] if target is None else [("target", target)])
    for option, name in required:
        if name not in arrays["train"]:
            close = nearest(name, arrays["train"])
            hint = f"did you mean {close!r}?" if close else f"there are {', '.join(arrays['train'])}"
            raise StageError(f"{option}: {readers['train'].where} has no {name!r} ({hint})")
    inputs = config.inputs or tuple(name for name in arrays["train"] if name != target)
    sources = {name: Source(readers[name].where, of, name) for name, of in arrays.items()}
    data = data_of(sources, Columns(config, inputs, target), ctx, dataset_name(file))
    return data if config.loss_function is None and config.metric_function is None else _with_functions(data, config)


def _with_functions(data: Data, config: PythonDataConfig) -> Data:
    """Return the data set with a task of the user's loss and metric, both of which are called once."""
    file = Path(config.file).expanduser().absolute()
    names = {"loss": config.loss_function, "metric": config.metric_function}
    references = {side: FunctionRef.in_file(file, name, {}) for side, name in names.items() if name is not None}
    own = {side: OwnFunction(address=of.address, source=of.source or "") for side, of in references.items()}
    task = OwnFunctionsTask(base=data.info.task.to_json(), higher_is_better=config.higher_is_better, **own)
    task = task.with_source_functions([address for of in references.values() for address in of.source_functions])
    for name in (metric.name for metric in data.info.task.metrics):
        if name == config.metric_function:
            raise StageError(f"metric_function: {name} is a metric of the task itself: give the function another name")
    for batch in islice(data.batches("train", batch_size=2), 1):
        outputs = dict(zip((spec.name for spec in task.outputs), zeros(task.outputs, len(batch)), strict=True))
        with torch.no_grad():
            _call_once(task, outputs, batch.targets, config.task)
    return Data(replace(data.info, task=task), data.splits, data.loader)


def _call_once(task: Task, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], name: str) -> None:
    """Call the user's functions. Raises StageError where they fail, with the shapes that a task of this name has."""
    try:
        task.sums(outputs, targets)
    except StageError as error:
        of_outputs, of_targets = (tuple(next(iter(side.values())).shape) for side in (outputs, targets))
        given = f"outputs of shape {of_outputs} and targets of shape {of_targets}"
        raise StageError(f"{error}; called with {given}, those of `task: {name}`") from error


def _splits(returned: object, what: str) -> dict[str, object]:
    """Return the data set of each split. Raises StageError where the function returned anything else."""
    if not isinstance(returned, Mapping):
        kind = type(returned).__name__
        raise StageError(f"{what} returned a {kind}, not a dict with the data sets of train and, if any, val and test")
    for name in returned:
        if name not in _SPLITS:
            hint = f" (did you mean {close!r}?)" if (close := nearest(str(name), _SPLITS)) else ""
            raise StageError(f"{what} returned a split {str(name)!r}; splits are train, val and test{hint}")
    if "train" not in returned:
        raise StageError(f"{what} returned no split train")
    return {name: returned[name] for name in _SPLITS if name in returned}


@dataclass(frozen=True)
class _Reader:
    """Reads one split."""

    file: Path
    what: str
    """The function and the split, for errors."""
    config: PythonDataConfig
    ctx: Context

    @property
    def target(self) -> str | None:
        return None if self.config.task == "unlabeled" else self.config.target

    @property
    def min_values(self) -> int:
        """Of a tuple: an input, and a target where there is one."""
        return 1 if self.target is None else 2

    @property
    def where(self) -> str:
        return f"{self.file.name}: {self.what}"

    def read(self, dataset: Any) -> Arrays:
        """Return the values by name: arrays as they are, and what the items of a Dataset hold."""
        if isinstance(dataset, DataLoader):
            raise StageError(f"{self.where}: it is a DataLoader: return its data set, `loader.dataset`")
        if isinstance(dataset, TensorDataset):
            dataset = dataset.tensors
        if isinstance(dataset, Mapping):
            return {str(name): self._array(value, name, name) for name, value in dataset.items()}
        if self.target is None and _is_array(dataset):
            dataset = (dataset,)
        if isinstance(dataset, list | tuple) and len(dataset) >= self.min_values and all(map(_is_array, dataset)):
            self._refuse_listed_samples(dataset)
            return {name: self._array(value, name, name) for name, value in self._named(dataset).items()}
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(dataset, str):
            kind = type(dataset).__name__
            raise StageError(
                f"{self.where}: it is a {kind}, not a torch Dataset with a length, a tuple of inputs and target, or a "
                "dict of arrays"
            )
        return self._items(dataset)

    def _refuse_listed_samples(self, arrays: Sequence[Any]) -> None:
        """Raise StageError for a list of arrays of one shape: they may be samples, and would be read as inputs."""
        is_listed = isinstance(arrays, list) and self.target is None and not self.config.inputs
        if is_listed and len(arrays) > _MAX_LISTED_INPUTS and len({of.shape for of in arrays}) == 1:
            raise StageError(
                f"{self.where}: it is a list of {len(arrays)} arrays of shape {tuple(arrays[0].shape)}: for so many "
                "samples return np.stack of it, for so many inputs a tuple"
            )

    def _items(self, dataset: Any) -> Arrays:
        """Read all items of a torch Dataset, in order, each once."""
        with own_errors(self.file, f"the length of {self.what}"):
            num_items = len(dataset)
        if not num_items:
            raise StageError(f"{self.where}: it has no items")
        first = self._item(dataset, 0)
        arrays = {name: np.empty((num_items, *value.shape), _stored(value.dtype)) for name, value in first.items()}
        with np.errstate(over="ignore"):  # infinity is refused where the arrays are checked
            for number in range(num_items):
                item = self._item(dataset, number) if number else first
                self._check_like_first(item, first, number)
                for name, value in item.items():
                    if value.dtype.kind in "iuU" and not np.can_cast(value.dtype, arrays[name].dtype):
                        # Item 0 had narrower integers, or a shorter name.
                        arrays[name] = arrays[name].astype(value.dtype)
                    arrays[name][number] = value
                if number % _PROGRESS_EVERY == 0:
                    self.ctx.progress(number, num_items, "items")
        self._report_random(dataset, arrays)
        return arrays

    def _item(self, dataset: Any, number: int) -> Arrays:
        with own_errors(self.file, f"item {number} of {self.what}"):
            item = dataset[number]
        if self.target is None and not isinstance(item, Mapping | list | tuple):
            item = (item,)
        if isinstance(item, Mapping):
            values = dict(item)
        elif isinstance(item, list | tuple) and len(item) >= self.min_values:
            values = self._named(item)
        else:
            raise StageError(
                f"{self.where}: item {number} is a {type(item).__name__}, not a tuple of inputs and target, or a dict"
            )
        return {str(name): self._array(value, name, f"{name} of item {number}") for name, value in values.items()}

    def _named(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs and the target, if any, of a tuple by name."""
        targets = () if self.target is None else (self.target,)
        num_inputs = len(values) - len(targets)
        names = self.config.inputs or (("input",) if num_inputs == 1 else [f"input_{n}" for n in range(num_inputs)])
        if len(names) != num_inputs:
            beside = " and a target" if targets else ""
            raise StageError(f"{self.where}: it has {num_inputs} inputs{beside}; inputs names {len(names)}")
        return dict(zip((*names, *targets), values, strict=True))

    def _array(self, value: Any, name: object, what: object) -> npt.NDArray[Any]:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        try:
            array = np.asarray(value)
        except Exception as error:  # any class may offer itself as an array
            raise StageError(f"{self.where}: {what} is no array: {error}") from error
        may_be_names = name == self.target and self.config.task == "classification"
        if array.dtype.kind not in ("buifU" if may_be_names else "buif"):
            kind = f"an array of {array.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
            remedy = ": take names as `array.astype(str)`" if may_be_names else ""
            raise StageError(f"{self.where}: {what} is {kind}, not numbers{remedy}")
        return array

    def _check_like_first(self, item: Arrays, first: Arrays, number: int) -> None:
        if item.keys() != first.keys():
            raise StageError(f"{self.where}: item {number} has {', '.join(item)}, item 0 has {', '.join(first)}")
        for name, value in item.items():
            if (value.shape, value.dtype.kind) != (first[name].shape, first[name].dtype.kind):
                found, wanted = (f"{of.dtype} of shape {of.shape}" for of in (value, first[name]))
                is_shape = value.shape != first[name].shape
                remedy = ": pad or resize in the data set, no collate_fn is called" if is_shape else ""
                raise StageError(
                    f"{self.where}: {name} of item {number} is {found}; that of item 0 is {wanted}{remedy}"
                )

    def _report_random(self, dataset: Any, arrays: Arrays) -> None:
        """Give a notice where an item has other values the second time."""
        num_items = len(next(iter(arrays.values())))
        for number in {*np.linspace(0, num_items - 1, _NUM_READ_TWICE).astype(int).tolist()}:
            for name, value in self._item(dataset, number).items():
                stored = value.astype(arrays[name].dtype)
                if stored.shape != arrays[name][number].shape or not _is_equal(stored, arrays[name][number]):
                    self.ctx.notice(
                        f"{self.where}: {name} of item {number} differs when it is read again: its random transforms "
                        "were applied once, and every epoch gets the same values. For random ones in each epoch, "
                        "return the pixels, name them under images, and use augment"
                    )
                    return


def _is_array(value: object) -> bool:
    """Return whether a tuple's member is the values of all samples, and not one of a list of samples."""
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


def _is_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.kind == "f" else dtype
