"""Calibration data as ONNX Runtime's quantizer reads it.

With a stride of one (`CalibStridedMinMax`, which serves all of its methods) the quantizer asks for one batch at a time
and merges what it observed before it asks for the next: memory is bounded by the tensors of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError
from ptpipe_torch import Data

MAX_BATCH_SIZE = 16
"""Every tensor of the network is kept for a batch where histograms are made of them."""
_ARRAYS = dict[str, npt.NDArray[Any]]


class CalibrationReader:
    """The first samples of a split, as a `CalibrationDataReader` of ONNX Runtime.

    Raises StageError where a value is not finite, or where all samples are one and the same constant.
    """

    def __init__(self, ctx: Context, data: Data, split: str, num_samples: int | None, batch_size: int | None) -> None:
        """`batch_size`: the only one that the network takes, to which a smaller batch is filled up; None: any."""
        found = len(data.splits[split])
        self._num_samples = min(num_samples or found, found)
        if self._num_samples < 2:
            raise StageError(
                f"{ctx.kind}: {split} has {found} sample{'s' * (found != 1)}, and ranges need two at least (hundreds "
                "to be of use): give the data stage a larger calibration_size, or choose another `split`"
            )
        self._ctx, self._data, self._split = ctx, data, split
        self._fixed = batch_size
        self._batch_size = batch_size or min(data.loader.batch_size, MAX_BATCH_SIZE)
        self._num_left, self._num_done = len(self), 0
        self._ranges: dict[str, tuple[float, float]] = {}
        self._batches = self._read()

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._num_samples // self._batch_size)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Allow to read that many batches; they come in their order."""
        self._num_left = end_index - start_index

    def get_next(self) -> _ARRAYS | None:
        """Return a batch; None where there is none, or none allowed."""
        if not self._num_left:
            return None
        self._num_left -= 1
        return next(self._batches, None)

    def _read(self) -> Iterator[_ARRAYS]:
        order_N = np.arange(self._num_samples)
        for batch in self._data.batches(self._split, order_N=order_N, batch_size=self._batch_size):
            arrays = batch.input_arrays()
            self._check_values(arrays)
            self._num_done += len(batch)
            if self._num_done == self._num_samples:
                self._check_ranges()
            self._ctx.progress(self._num_done, self._num_samples, "samples")
            yield {name: self._filled_up(array) for name, array in arrays.items()}

    def _check_values(self, arrays: _ARRAYS) -> None:
        for name, array in arrays.items():
            is_finite_B = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
            if not is_finite_B.all():
                sample = self._data.splits[self._split].ids[self._num_done + int(is_finite_B.argmin())]
                raise StageError(f"{self._ctx.kind}: {name} of {sample} is not finite: mend the data, or leave it out")
            low, high = self._ranges.get(name, (np.inf, -np.inf))
            self._ranges[name] = min(low, float(array.min())), max(high, float(array.max()))

    def _check_ranges(self) -> None:
        if all(low == high for low, high in self._ranges.values()):
            values = ", ".join(f"{name} is {low:g}" for name, (low, _) in self._ranges.items())
            raise StageError(
                f"{self._ctx.kind}: all {self._num_samples} calibration samples are the same constant ({values}): "
                "calibrate on real ones"
            )

    def _filled_up(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        missing = (self._fixed or 0) - len(array)
        return array if missing <= 0 else np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
