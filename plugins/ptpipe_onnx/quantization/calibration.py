"""Calibration data as ONNX Runtime's quantizer reads it.

With a stride of one (`CalibStridedMinMax`, which serves all of its methods) the quantizer asks for one batch at a time
and merges what it observed before it asks for the next: memory is bounded by the tensors of one batch.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import Context
from ptpipe_torch import Data
from ptpipe_torch.data.calibration_samples import check_finite, num_calibration_samples

MAX_BATCH_SIZE = 16
"""Every tensor of the network is kept for a batch where histograms are made of them."""
_ARRAYS = dict[str, npt.NDArray[Any]]


class CalibrationReader:
    """The first samples of a split, as a `CalibrationDataReader` of ONNX Runtime.

    Raises StageError where a value is not finite, or where there are not two samples that differ.
    """

    def __init__(self, ctx: Context, data: Data, split: str, num_samples: int | None, batch_size: int | None) -> None:
        """`batch_size`: the only one that the network takes, to which a smaller batch is filled up; None: any."""
        self._num_samples = num_calibration_samples(ctx.kind, data, split, num_samples)
        self._ctx, self._data, self._split = ctx, data, split
        self._fixed = batch_size
        self._batch_size = batch_size or min(data.loader.batch_size, MAX_BATCH_SIZE)
        self._num_left, self._num_done = len(self), 0
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

    def close(self) -> None:
        """End the data workers. The quantizer does not ask for more batches than there are, so they wait for it."""
        self._batches.close()

    def _read(self) -> Generator[_ARRAYS]:
        order_N = np.arange(self._num_samples)
        for batch in self._data.batches(self._split, order_N=order_N, batch_size=self._batch_size):
            check_finite(self._ctx.kind, self._data, self._split, batch)
            self._num_done += len(batch)
            self._ctx.progress(self._num_done, self._num_samples, "samples")
            yield {name: self._filled_up(array) for name, array in batch.input_arrays().items()}

    def _filled_up(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        missing = (self._fixed or 0) - len(array)
        return array if missing <= 0 else np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
