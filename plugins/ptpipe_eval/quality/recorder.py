"""Keep of each sample what comparisons need, while a model is evaluated.

Shape legend: N samples, B of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ptpipe import JSON
from ptpipe_eval.quality.details import ModelDetails, numbers_of, tables_of
from ptpipe_eval.quality.paired import ModelSamples
from ptpipe_torch import Task
from ptpipe_torch.task.ranking import RANKED, added, rows_of_samples

_MAX_BYTES = 64 << 20
"""Of the sums of all samples, for each model. `RANKED` is left out first; what is right or wrong is always kept."""


class SampleRecorder:
    """Collects the batches of one model."""

    def __init__(self, task: Task, num_samples: int) -> None:
        self._task = task
        self._num_samples = num_samples
        self._batches: dict[str, list[npt.NDArray[Any]]] = {}
        self._predictions: list[npt.NDArray[np.int64]] = []
        self._labels: list[npt.NDArray[np.int64]] = []
        self._numbers: list[npt.NDArray[Any]] = []
        self._targets: list[npt.NDArray[Any]] = []
        self._are_classes = True
        self._is_complete = True
        self._has_ranking = True

    def add(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        """Add a batch."""
        sums = rows_of_samples(self._task, outputs, targets)
        self._is_complete &= self._fits(added(sums))
        self._has_ranking &= self._fits(sums)
        for name, rows_B in sums.items():
            if self._is_kept(name, rows_B):
                self._batches.setdefault(name, []).append(rows_B)
        kept = self._task.samples(outputs, targets)
        prediction = kept["prediction"].numpy()
        if not np.issubdtype(prediction.dtype, np.floating):
            self._predictions.append(_numbers(prediction))
        elif "targets" in kept:
            self._numbers.append(prediction)
            self._targets.append(kept["targets"].numpy())
        self._are_classes &= prediction.ndim == 1
        if "labels" in kept and kept["labels"].dim() == 1:
            self._labels.append(kept["labels"].numpy().astype(np.int64))

    def result(self) -> ModelSamples:
        """Return what all batches had."""
        return ModelSamples(
            sums={
                name: np.concatenate(parts) for name, parts in self._batches.items() if self._is_kept(name, parts[0])
            },
            predictions_N=np.concatenate(self._predictions) if self._predictions else None,
            labels_N=np.concatenate(self._labels) if self._labels else None,
            is_complete=self._is_complete,
            has_ranking=self._has_ranking,
        )

    def _fits(self, sums: Mapping[str, npt.NDArray[Any]]) -> bool:
        sizes = [of.nbytes * self._num_samples / len(of) for of in sums.values() if of.dtype != np.bool_]
        return sum(sizes) <= _MAX_BYTES

    def _is_kept(self, name: str, rows: npt.NDArray[Any]) -> bool:
        return (self._has_ranking if name == RANKED else self._is_complete) or rows.dtype == np.bool_

    def details(self, figures: Mapping[str, JSON]) -> ModelDetails:
        """Return what reports show of the samples. `figures`: the task's, of all samples."""
        losses = [part for part in self._batches.get("loss", ()) if part.ndim == 1]
        is_known = self._are_classes and self._predictions
        return ModelDetails(
            tables_of(figures),
            np.concatenate(losses).astype(np.float32) if losses and self._is_complete else None,
            np.concatenate(self._predictions).astype(np.int32) if is_known else None,
            numbers_of(self._numbers, self._num_samples),
        )

    def targets(self) -> npt.NDArray[np.float32] | None:
        """Return the numbers that were to be predicted, (N, T); None where there are none, or too many."""
        return numbers_of(self._targets, self._num_samples)


def _numbers(prediction: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return a number for each row, (B,): a digest of 8 bytes where a row has several."""
    if prediction.ndim == 1:
        return prediction.astype(np.int64)
    rows = np.ascontiguousarray(prediction).reshape(len(prediction), -1)
    digests = b"".join(blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, dtype=np.int64)
