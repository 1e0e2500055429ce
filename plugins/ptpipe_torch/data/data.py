"""A data set in disjoint splits, read as batches of tensors.

Shape legend: N samples of a split, B of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, Artifact, StageError
from ptpipe_torch.data.column import ArrayColumn, Column, SubsetColumn
from ptpipe_torch.data.dataset_info import DatasetInfo
from ptpipe_torch.data.order import batched_by_length, block_order, epoch_order
from ptpipe_torch.data.raw_form import NORMALIZED, InputForm

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ptpipe_torch.data.dataloader import Loading
    from ptpipe_torch.data.mixing import Mixing

SPLITS = ("train", "val", "test", "calibration")
LOADING_OPTIONS = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
"""Options that change no bit of a batch: they are not stored with a data set."""
_PART_ROWS = 1024
_DISJOINT = (("test", "train"), ("test", "val"), ("test", "calibration"), ("val", "train"))


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are loaded; named as the arguments of torch's DataLoader."""

    batch_size: int = 128
    num_workers: int = 0
    """Processes that decode and augment; 0: the calling process. Batches are the same for any number."""
    pin_memory: bool = True
    """Page-locked batches where they are copied to a CUDA device: with others, the process waits."""
    prefetch_factor: int = 2
    """Batches that each worker loads in advance."""
    persistent_workers: bool = False
    """Keep the workers from one epoch to the next, until the Data is deleted."""
    augment: tuple[str, ...] = ()
    """Names of whole-batch augmentations (ptpipe_torch.data.augment), applied to training batches in this order."""
    batch_by_length: bool = False
    """Whether training batches have samples of similar lengths, so that they need little padding."""
    shuffle_buffer: int | None = None
    """Samples in the window that an epoch is shuffled in, where they lie in blocks (`Column.blocks`); None: all."""


@dataclass(frozen=True, eq=False)
class Split:
    """Samples of one split: ids, and columns with a row for each of them."""

    ids: npt.NDArray[np.str_]
    """(N,) names in the source, whatever subset of it is drawn: `train/00042`."""
    inputs: Mapping[str, Column]
    targets: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def columns(self) -> Mapping[str, Column]:
        """All columns by name."""
        return {**self.inputs, **self.targets}

    def subset(self, positions: npt.NDArray[np.int64]) -> Split:
        """Return the samples at `positions`, in that order; the values are shared, not copied."""
        inputs, targets = (
            {name: SubsetColumn(column, positions) for name, column in columns.items()}
            for columns in (self.inputs, self.targets)
        )
        return Split(self.ids[positions], inputs, targets)


@dataclass(frozen=True, eq=False)
class Partners:
    """What the samples that those of a batch are mixed with give to its loss."""

    targets: Mapping[str, torch.Tensor]
    """By name, in the rows of the samples."""
    weights_B: torch.Tensor
    """float32: of the loss with the batch's own targets; that with the partners' targets has the rest."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The input of a training or evaluation step."""

    inputs: Mapping[str, torch.Tensor]
    """By name, in the order of the signature. Empty where they were not asked for."""
    targets: Mapping[str, torch.Tensor]
    """By name."""
    indices_N: torch.Tensor
    """int64, on the CPU: positions in the split (`split.ids[indices]` are the ids). Further rows of the tensors are
    padding."""
    partners: Partners | None = None
    """Of mixed samples; None: they aren't."""

    def __len__(self) -> int:
        """B, without padding."""
        return len(self.indices_N)

    def rows(self, start: int, stop: int) -> Batch:
        """Return the rows from `start` to `stop`, exclusive, as views."""
        return self._mapped(lambda tensor: tensor[start:stop], self.indices_N[start:stop])

    def take(self, rows_B: torch.Tensor, num_samples: int) -> Batch:
        """Return copies of the rows `rows_B`, of which the first `num_samples` are samples. The memory format stays."""
        return self._mapped(lambda tensor: _taken(tensor, rows_B), self.indices_N[rows_B[:num_samples]])

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor], indices_N: torch.Tensor) -> Batch:
        inputs, targets = (
            {name: change(tensor) for name, tensor in side.items()} for side in (self.inputs, self.targets)
        )
        if self.partners is None:
            return Batch(inputs, targets, indices_N)
        others = {name: change(tensor) for name, tensor in self.partners.targets.items()}
        return Batch(inputs, targets, indices_N, Partners(others, change(self.partners.weights_B)))

    def clone(self) -> Batch:
        """Return a copy with tensors of its own."""
        return self._mapped(lambda tensor: tensor.clone(), self.indices_N)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors but the indices."""
        partners = [] if self.partners is None else [*self.partners.targets.values(), self.partners.weights_B]
        return [*self.inputs.values(), *self.targets.values(), *partners]

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """The inputs as the network takes them: `network(*batch.args)`."""
        return tuple(self.inputs.values())

    def input_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs as a `Predictor` takes them, C-contiguous, in the order of the signature."""
        import numpy as np

        return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in self.inputs.items()}


class Data(Artifact):
    """A data set in splits `train`, `val`, `test` and `calibration` (some may be empty), with its loader options.

    `splits`: by name. `loader`: its options; those of `LOADING_OPTIONS` are not saved: a loaded data set has their
    defaults until `with_options`. `assets`: see there.

    Raises StageError where an id is in two splits that must be disjoint (test and any other, val and train) or twice
    in one, where a target has a value that it can't have (a label that is no class), for an unknown augmentation, and
    where ids are no texts, a column is no `Column`, or the task names an output that it doesn't have.
    """

    def __init__(
        self,
        info: DatasetInfo,
        splits: Mapping[str, Split],
        loader: LoaderOptions = LoaderOptions(),
        assets: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        from ptpipe_torch.data.augment import check_augment

        assert splits, f"{info.name} has no split, not even an empty one"
        assert info.inputs.keys().isdisjoint(info.targets), f"{info.name} has columns that are inputs and targets"
        info.check_names()
        for name, split in splits.items():
            _check_types(name, split)
        self.info = info
        nothing = _nothing_of(next(iter(splits.values())))
        self.splits: Mapping[str, Split] = {name: splits.get(name, nothing) for name in SPLITS}
        self.loader = loader
        self.assets = assets
        """Small files that users of a model of this data set need too, by name: `tokenizer.json`."""
        self._loading: Loading | None = None
        assert set(splits) <= set(SPLITS), f"splits are {SPLITS}, not {tuple(splits)}"
        check_augment(loader.augment, info.inputs, info.targets)
        for name, split in self.splits.items():
            _check_split(name, split, info)
        _refuse_overlap(self.splits)

    def batches(  # noqa: PLR0913  # by keyword, and independent of each other
        self,
        split: str,
        *,
        order_N: npt.NDArray[np.int64] | None = None,
        batch_size: int | None = None,
        augment_seed: Sequence[int] | None = None,
        channels_last: bool = False,
        device: torch.device | str | None = None,
        with_inputs: bool = True,
        mixing: Mixing | None = None,
        input_form: InputForm = NORMALIZED,
    ) -> Iterator[Batch]:
        """Yield the batches of `split`, by name; the last one may be smaller.

        `order_N`: positions to yield, in this order (default: all); `epoch_order()` for training, a slice of it to
        resume in mid-epoch or to divide it among ranks. `batch_size`: default the loader's. `augment_seed`:
        non-negative integers, e.g. (seed, epoch), which together with a sample's position decide its augmentation;
        None: don't augment. `channels_last`: memory format of images. `device`: where the tensors are put; images are
        transferred as bytes and normalized there. `with_inputs`: false reads targets alone. `mixing`: with which other
        samples the samples are mixed, after normalization; None: they aren't. `input_form`: what a model takes.

        The same arguments give bit-identical batches for any number of workers. Raises StageError for an image file
        that is missing or can't be decoded, and where a worker process died.
        """
        import numpy as np

        from ptpipe_torch.data.dataloader import Loading, Request

        if self._loading is None:
            self._loading = Loading(self)
        order_N = np.array(np.arange(len(self.splits[split])) if order_N is None else order_N, dtype=np.int64)
        size = batch_size or self.loader.batch_size
        seed = None if augment_seed is None or not self.loader.augment else tuple(augment_seed)
        samples = [order_N[start : start + size] for start in range(0, len(order_N), size)]
        requests = [Request(mixing.to_read(of) if mixing else of, seed, len(of)) for of in samples]
        return self._loading.batches(
            split,
            requests,
            channels_last=channels_last,
            device=device,
            mixing=mixing,
            input_form=input_form if with_inputs else None,
        )

    def epoch_order(self, split: str, seed: int, epoch: int, batch_size: int) -> npt.NDArray[np.int64]:
        """Return the order in which the epoch numbered `epoch` takes the samples of `split`: int64 of shape (N,).

        `seed`: decides the order. `batch_size`: the samples of a batch over all workers; matters with `batch_by_length`
        alone.
        """
        samples = self.splits[split]
        window = self.loader.shuffle_buffer
        blocks_N = _blocks_of(samples) if window else None
        if window is None or blocks_N is None:
            order_N = epoch_order(len(samples), seed, epoch)
        else:
            order_N = block_order(blocks_N, window, seed, epoch)
        lengths_N = _lengths_of(samples) if self.loader.batch_by_length else None
        return order_N if lengths_N is None else batched_by_length(order_N, lengths_N, batch_size, seed, epoch)

    def save(self, folder: Path) -> None:
        from ptpipe_torch.data.data_folder import write_data

        write_data(self, folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Inverse of `save`; arrays are memory-mapped. Raises StageError where an image folder is missing."""
        from ptpipe_torch.data.data_folder import read_data

        return cls(*read_data(folder))

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        from ptpipe_torch.data.data_folder import asset_names

        return asset_names(folder)

    def with_options(self, options: Mapping[str, JSON]) -> Self:
        """Return the same data set, loaded with those of the options that change no batch (`num_workers`)."""
        given: dict[str, Any] = {name: options[name] for name in LOADING_OPTIONS if name in options}
        other = copy(self)
        other.loader, other._loading = replace(self.loader, **given), None
        return other

    def with_source_functions(self, functions: Sequence[str]) -> Self:
        other = copy(self)
        other.info, other._loading = replace(self.info, task=self.info.task.with_source_functions(functions)), None
        return other

    def summary(self) -> dict[str, JSON]:
        sizes: dict[str, JSON] = {f"num_{name}": len(split) for name, split in self.splits.items()}
        return {
            "name": self.info.name,
            "inputs": [str(spec) for spec in self.info.signature.inputs],
            **self.info.task.summary(),
            **sizes,
            "task": type(self.info.task).__name__,
            "metrics": [metric.name for metric in self.info.task.metrics],
        }


def _taken(tensor: torch.Tensor, rows_B: torch.Tensor) -> torch.Tensor:
    import torch

    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    return tensor[rows_B.to(tensor.device)].contiguous(memory_format=layout)


def _lengths_of(split: Split) -> npt.NDArray[np.int64] | None:
    """Return the length of each sample, of the first input that is padded; None where none is."""
    return next((found for column in split.inputs.values() if (found := column.lengths) is not None), None)


def _blocks_of(split: Split) -> npt.NDArray[np.int64] | None:
    """Return the block that each sample lies in, of the first input that has some; None where none has."""
    return next((found for column in split.inputs.values() if (found := column.blocks()) is not None), None)


def _nothing_of(split: Split) -> Split:
    import numpy as np

    return split.subset(np.empty(0, dtype=np.int64))


def _check_types(name: str, split: Split) -> None:
    import numpy as np

    if not isinstance(split.ids, np.ndarray) or (len(split) and split.ids.dtype.kind not in "UT"):
        raise StageError(f"split {name}: ids must be a NumPy array of texts, as np.array(['train/00042']) is")
    columns: Mapping[str, object] = split.columns
    for column, values in columns.items():
        if not isinstance(values, Column):
            kind = type(values).__name__
            raise StageError(f"split {name}: {column} is a {kind} and no Column: put an array into ArrayColumn(...)")


def _check_split(name: str, split: Split, info: DatasetInfo) -> None:
    assert split.inputs.keys() == info.inputs.keys(), f"split {name} has the inputs {tuple(split.inputs)}"
    assert split.targets.keys() == info.targets.keys(), f"split {name} has the targets {tuple(split.targets)}"
    sizes = {"ids": len(split), **{column: len(values) for column, values in split.columns.items()}}
    assert len(set(sizes.values())) == 1, f"split {name} has columns of different lengths: {sizes}"

    def check_values(columns: Mapping[str, Column]) -> None:
        for column, values in columns.items():
            info.columns[column].check_values(f"split {name}: {column}", values)

    for column, values in split.columns.items():
        _check_rows(check_values, {column: values}, split.ids)
    _check_rows(partial(info.task.check_targets, name), split.targets, split.ids)


def _check_rows(
    check: Callable[[Mapping[str, Column]], None], columns: Mapping[str, Column], ids: npt.NDArray[np.str_]
) -> None:
    """Check columns, whose error gets the id of the first sample that is refused alone, if one is."""
    import numpy as np

    def is_refused(rows_B: npt.NDArray[np.int64]) -> bool:
        try:
            check({name: ArrayColumn(column.take(rows_B)) for name, column in columns.items()})
        except StageError:
            return True
        except Exception:  # noqa: BLE001  # of a task that can't check so few samples: the error below is the one
            return False
        return False

    try:
        check(columns)
    except StageError as error:
        rows_N = np.arange(len(ids))
        parts = (rows_N[start : start + _PART_ROWS] for start in range(0, len(ids), _PART_ROWS))
        rows = (row for part in parts if is_refused(part) for row in part.tolist() if is_refused(rows_N[row : row + 1]))
        if (row := next(rows, None)) is None:
            raise
        raise StageError(f"sample {ids[row]}: {error}") from None


def _refuse_overlap(splits: Mapping[str, Split]) -> None:
    ids = {name: set(split.ids.tolist()) for name, split in splits.items()}
    for name, split in splits.items():
        if len(ids[name]) != len(split):
            raise StageError(f"split {name} has {len(split)} samples but only {len(ids[name])} different ids")
    for one, other in _DISJOINT:
        shared = ids[one] & ids[other]
        if shared:
            raise StageError(f"{len(shared)} samples are in both {one} and {other}, among them {min(shared)}")
