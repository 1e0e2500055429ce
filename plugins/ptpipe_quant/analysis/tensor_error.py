"""Accumulate what rounding does to the values of a tensor.

A value whose nearest integer lies inside the range is off by at most half a step. One at an end of the range that is
off by more is clipped. Nothing else may be off by more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ptpipe_quant.analysis.layer_errors import TensorError
from ptpipe_torch.int8.layers import QuantizedWeight
from ptpipe_torch.int8.observers import NARROW

TOLERANCE = 1e-3
"""Of the bound, in half steps: float32's rounding of x / scale, up to 255, is 255 * 2^-23 steps."""


@dataclass
class ErrorSums:
    """Sums over all values of a tensor so far."""

    signal: float = 0.0
    noise: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    num_clipped: int = 0
    num_values: int = 0
    max_error_ratio: float = 0.0

    def add(self, x: torch.Tensor, integers: torch.Tensor, grid: Grid) -> None:
        """Add values and the integers that they are rounded to."""
        if not x.numel():
            return
        values = x.double()
        errors = (values - (integers.double() - grid.zero_point) * grid.scale).abs_()
        ratios = errors / (grid.max_steps * grid.scale)
        is_at_end = (integers <= grid.first) | (integers >= grid.last)
        is_clipped = is_at_end & (ratios > 1 + TOLERANCE)
        self.signal += float(values.square().sum())
        self.noise += float(errors.square().sum())
        low, high = (float(limit) for limit in torch.aminmax(values))
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self.num_clipped += int(is_clipped.sum()) if grid.is_calibrated else 0
        self.num_values += x.numel()
        self.max_error_ratio = max(self.max_error_ratio, float(ratios.masked_fill(is_clipped, 0).max()))

    def result(self) -> TensorError | None:
        """Return the figures; None where there was no value."""
        if not self.num_values:
            return None
        clipped = self.num_clipped / self.num_values
        return TensorError(
            decibels(self.signal, self.noise), self.minimum, self.maximum, clipped, round(self.max_error_ratio, 6)
        )


@dataclass(frozen=True)
class Grid:
    """The values that integers stand for: (integer - zero point) * scale, from the first to the last integer."""

    scale: torch.Tensor
    """float64, of a shape that broadcasts."""
    zero_point: torch.Tensor
    first: int
    last: int
    max_steps: float = 0.5
    """By how much rounding changes a value at most."""
    is_calibrated: bool = True
    """Whether its ends come from data. Those of another one no option moves: what is beyond is not clipped."""


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal / noise); None where there is no noise. Without a signal, noise is at least its size."""
    if noise <= 0:
        return None
    return round(10 * math.log10(max(signal, 1e-30) / noise), 2)


def weight_error(before: torch.Tensor, quantized: QuantizedWeight, *, is_learned: bool = False) -> TensorError | None:
    """Return what rounding does to a weight. `is_learned`: to either of the two integers beside each value."""
    shape = [-1 if quantized.per_channel and axis == quantized.axis else 1 for axis in range(before.dim())]
    scale, zero_point = (
        torch.from_numpy(array.reshape(shape)).double() for array in (quantized.scales, quantized.zero_points)
    )
    integers = torch.from_numpy(quantized.integers)
    last = NARROW if integers.int().abs().max() <= NARROW else 127  # learned ranges clip
    sums = ErrorSums()
    sums.add(before, integers, Grid(scale, zero_point, -last, last, max_steps=1.0 if is_learned else 0.5))
    return sums.result()
