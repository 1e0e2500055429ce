"""Real samples to time predictions on.

Shape legend: N samples, in the order of a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_torch import BATCH, InputForm, TensorSpec, TokensInfo

if TYPE_CHECKING:
    from ptpipe_eval.predict import EvalSplit

Inputs: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""One batch, as a `Predictor` takes it."""

_MAX_INPUTS = 8
"""Distinct inputs that a cell cycles through, so that no single sample decides."""
_MAX_INPUT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class CellBatches:
    """What is predicted in one cell."""

    batch_size: int
    length: int | None
    """Of the sequences; None: that of the samples."""
    batches: Mapping[InputForm, Sequence[Inputs]]
    """For each form that one of the models takes."""


def check_lengths(split: EvalSplit, lengths: Sequence[int]) -> None:
    """Raise StageError where no input of the data set has sequences of any length, or none is so long."""
    inputs = split.data.info.inputs
    specs = [info.spec(name) for name, info in inputs.items()]
    if lengths and not any(_free_axes(spec) for spec in specs):
        raise StageError(
            f"lengths: no input of {split.data.info.name} has an axis of any size: {', '.join(map(str, specs))}"
        )
    longest = [info.max_length for info in inputs.values() if isinstance(info, TokensInfo)]
    if lengths and longest and max(lengths) > min(longest):
        limit = f"whose max_length is {min(longest)}"
        raise StageError(f"lengths: {max(lengths)} is longer than any text of {split.data.info.name}, {limit}")


def resized(split: EvalSplit, batch: Inputs, length: int | None) -> Inputs:
    """Return a batch whose sequences are cut, or padded at their end, to a length; None: as it is."""
    if length is None:
        return batch
    changed = {}
    for name, info in split.data.info.inputs.items():
        array, padding = batch[name], info.padding_id if isinstance(info, TokensInfo) else 0
        for axis in _free_axes(info.spec(name)):
            array = array.take(np.arange(min(length, array.shape[axis])), axis)
            missing = [(0, length - size if own == axis else 0) for own, size in enumerate(array.shape)]
            array = np.pad(array, missing, constant_values=padding)
        changed[name] = array
    return changed


def _free_axes(spec: TensorSpec) -> list[int]:
    """Return the axes, other than that of the batch, that may have any size."""
    return [axis for axis, size in enumerate(spec.shape) if isinstance(size, str) and size != BATCH]


def spread_inputs(split: EvalSplit, batch_size: int, length: int | None = None) -> list[Inputs]:
    """Return batches of samples spread evenly over the split; samples repeat if there are few.

    `length`: what sequences are cut or padded to; None: as in any batch.
    """
    num_samples = len(split.samples)
    form, order_N = split.input_form, np.zeros(1, dtype=np.int64)
    sample = next(iter(split.data.batches(split.name, order_N=order_N, input_form=form))).input_arrays()
    batch_bytes = batch_size * max(1, sum(array.nbytes for array in sample.values()))
    num_inputs = max(1, min(_MAX_INPUTS, num_samples // batch_size, _MAX_INPUT_BYTES // batch_bytes))
    num_wanted = batch_size * num_inputs
    order_N = np.arange(num_wanted, dtype=np.int64) * num_samples // num_wanted
    batches = split.data.batches(split.name, order_N=order_N, batch_size=batch_size, input_form=form)
    return [resized(split, batch.input_arrays(), length) for batch in batches]
