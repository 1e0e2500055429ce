"""Tasks of data sets that have numbers as targets.

Shape legend: N samples of train, T targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe_torch import Regression

if TYPE_CHECKING:
    from ptpipe_data.config import TaskConfig

_CONSTANT = 1e-12
"""Relative standard deviation below which values are constant but for rounding."""


def regression(names: Sequence[str], config: TaskConfig, train_NT: npt.NDArray[np.float64]) -> Regression:
    """Return the task."""
    mean_T, std_T = mean_and_std(train_NT)
    return Regression(
        target_names=tuple(names),
        mean=tuple(mean_T.tolist()),
        std=tuple(std_T.tolist()),
        loss=config.loss or "mse",
        huber_delta=config.huber_delta or 1.0,
    )


def mean_and_std(values_NT: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and standard deviation of each column, without NaN; the standard deviation of a constant is 1."""
    known_NT = np.ma.masked_invalid(values_NT)
    mean_T, std_T = np.asarray(known_NT.mean(axis=0).filled(0.0)), np.asarray(known_NT.std(axis=0).filled(0.0))
    return mean_T, np.where(std_T > _CONSTANT * np.abs(mean_T), std_T, 1.0)
