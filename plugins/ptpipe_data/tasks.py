"""Tasks of data sets that have numbers as targets.

Shape legend: N samples of train, T targets, C channels, R rows of a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_torch import Regression

if TYPE_CHECKING:
    from ptpipe_data.config import TaskConfig

_CONSTANT = 1e-12
"""Relative standard deviation below which values are constant but for rounding."""
_MAX_STEP = 0.1
"""Of a target in float32, as a fraction of its standard deviation: rounding takes 0.001 of R2."""
_PART_VALUES = 1 << 22
"""That are converted to float64 at a time."""


def regression(
    names: Sequence[str], config: TaskConfig, train: npt.NDArray[Any], data_range: float | None = None
) -> Regression:
    """Return the task. `train`: targets, (N, T) or (N, T, ...) with positions.

    Raises StageError where float32, in which targets are stored, would round away how they differ.
    """
    mean_T, std_T = mean_and_std(train.astype(np.float64)) if train.ndim == 2 else moments(train)
    _check_steps(names, train, std_T)
    return Regression(
        target_names=tuple(names),
        mean=tuple(mean_T.tolist()),
        std=tuple(std_T.tolist()),
        loss=config.loss or "mse",
        huber_delta=config.huber_delta or 1.0,
        positions=train.shape[2:],
        data_range=data_range,
    )


def mean_and_std(values_NT: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and standard deviation of each column, without NaN; the standard deviation of a constant is 1."""
    known_NT = np.ma.masked_invalid(values_NT)
    mean_T, std_T = np.asarray(known_NT.mean(axis=0).filled(0.0)), np.asarray(known_NT.std(axis=0).filled(0.0))
    return mean_T, np.where(std_T > _CONSTANT * np.abs(mean_T), std_T, 1.0)


def moments(values: npt.NDArray[Any], channel_axis: int = 1) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and standard deviation of each channel over all rows and positions, as `mean_and_std`; in parts.

    `values`: float32 (N, ...), which may lie in a file.
    """
    axes = tuple(axis for axis in range(values.ndim) if axis != channel_axis)
    num_values = values.size // values.shape[channel_axis]
    mean = sum(part_R.sum(axes, dtype=np.float64, keepdims=True) for part_R in _parts(values)) / num_values
    variance_C = sum(np.square(part_R - mean).sum(axes) for part_R in _parts(values)) / num_values
    mean_C, std_C = np.ravel(mean), np.sqrt(variance_C)
    return mean_C, np.where(std_C > _CONSTANT * np.abs(mean_C), std_C, 1.0)


def _check_steps(names: Sequence[str], train: npt.NDArray[Any], std_T: npt.NDArray[np.float64]) -> None:
    axes = (0, *range(2, train.ndim))
    largest_T = np.maximum(train.max(axes, initial=0), -train.min(axes, initial=0)).astype(np.float64)
    step_T = np.ldexp(1.0, np.frexp(largest_T)[1] - 24)
    for name, largest, step, std in zip(names, largest_T, step_T, std_T, strict=True):
        if step > _MAX_STEP * std and std != 1:  # 1: a constant
            raise StageError(
                f"target {name!r}: float32, in which targets are stored, has steps of {step:.3g} at {largest:.10g}, "
                f"and the standard deviation is {std:.3g}: subtract a constant, such as their mean"
            )


def _parts(values: npt.NDArray[Any]) -> Iterable[npt.NDArray[Any]]:
    num_rows = max(1, _PART_VALUES // max(1, values[:1].size))
    return (values[start : start + num_rows] for start in range(0, len(values), num_rows))
