"""Real samples to time predictions on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ptpipe_eval.predict import EvalSplit

Inputs: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""One batch, as a `Predictor` takes it."""

_MAX_INPUTS = 8
"""Distinct inputs that a cell cycles through, so that no single sample decides."""
_MAX_INPUT_BYTES = 64 * 2**20


def spread_inputs(split: EvalSplit, batch_size: int) -> list[Inputs]:
    """Return batches of samples spread evenly over the split; samples repeat if there are few."""
    num_samples = len(split.samples)
    sample = next(iter(split.data.batches(split.name, order_N=np.zeros(1, dtype=np.int64)))).input_arrays()
    batch_bytes = batch_size * max(1, sum(array.nbytes for array in sample.values()))
    num_inputs = max(1, min(_MAX_INPUTS, num_samples // batch_size, _MAX_INPUT_BYTES // batch_bytes))
    num_wanted = batch_size * num_inputs
    order_N = np.arange(num_wanted, dtype=np.int64) * num_samples // num_wanted
    batches = split.data.batches(split.name, order_N=order_N, batch_size=batch_size)
    return [batch.input_arrays() for batch in batches]
