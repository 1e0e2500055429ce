"""The range of least squared quantization error for values with a given histogram.

torch's `HistogramObserver` narrows the range greedily, for 256 levels whatever `quant_max` is, and stops at the first
step that does not help: its error can be many times the least one. Here the error of a candidate range is computed
exactly for values that are uniform within each bin, rounding and clipping in one formula, and all candidates of a
grid are compared, but for those whose clipping alone costs more than another candidate.

Shape legend: C histogram bins, E their edges (C + 1), R candidate ranges, L levels (integers of the quantized type).
"""

from __future__ import annotations

import torch

from ptpipe_torch.int8.value_counts import MAX_INDEX, Histogram

# The grid: the range's ends times 1, 1 / 1.3, ..., 1 / 1.3^20 = 1 / 190; then finer ones around the best.
_RATIO, _NUM_STEPS = 1.3, 21
_FINER_RATIOS, _FINER_STEPS = (_RATIO**0.25, _RATIO**0.0625), 4
_MARGIN = 1e-6
"""Of an error, for its rounding."""


def least_error_range(histogram: Histogram, limits: torch.Tensor, num_levels: int) -> torch.Tensor:
    """Return the range, shape (2,) and including zero, with the least squared error of `num_levels` levels.

    `limits`: minimum and maximum, which differ. Both ends of the result are multiples of the scale, so that the zero
    point is an integer.
    """
    ends = torch.stack([limits[0].clamp(max=0), limits[1].clamp(min=0)])
    error_of = QuantizationError(histogram)
    fractions = [_RATIO ** -torch.arange(_NUM_STEPS, dtype=torch.float64)] * 2
    for finer in (*_FINER_RATIOS, None):
        grid_R2 = torch.cartesian_prod(*(part if end else part[:1] for part, end in zip(fractions, ends, strict=True)))
        scales_R = (grid_R2 * ends).diff(dim=1)[:, 0] / (num_levels - 1)
        zero_points_R = (-grid_R2[:, 0] * ends[0] / scales_R).round()
        diagonal = slice(None, None, len(fractions[0]) + 1)  # of a grid of both ends: the same step of each
        best = error_of.least(scales_R, zero_points_R, num_levels, diagonal)
        if finer is not None:
            steps = finer ** torch.arange(-_FINER_STEPS, _FINER_STEPS + 1, dtype=torch.float64)
            fractions = [(steps * fraction).clamp_(max=1) for fraction in grid_R2[best]]
    first, last = -zero_points_R[best], num_levels - 1 - zero_points_R[best]
    return torch.stack([first, last]) * scales_R[best]


class QuantizationError:
    """Sum of squared differences between values with this histogram, uniform in each bin, and the nearest level."""

    def __init__(self, histogram: Histogram) -> None:
        self._counts_C, self._edges_E, self._bin_width = histogram
        moments = _moments(self._counts_C, self._edges_E[:-1], self._edges_E[1:])
        self._cumulative = [torch.cat([moment_C.new_zeros(1), moment_C.cumsum(0)]) for moment_C in moments]
        """Sums of x^p of all values up to each edge, for p = 0, 1, 2."""

    def __call__(self, scales_R: torch.Tensor, zero_points_R: torch.Tensor, num_levels: int) -> torch.Tensor:
        """Return the error (R,) with the levels (integer - zero point) * scale; values beyond the ends are clipped."""
        levels_RL = (torch.arange(num_levels) - zero_points_R[:, None]) * scales_R[:, None]
        below = self._moments_below((levels_RL[:, 1:] + levels_RL[:, :-1]) / 2)
        zeroth, first, second = (
            torch.cat([moment[:, :1], moment.diff(dim=1), total[-1] - moment[:, -1:]], dim=1)
            for moment, total in zip(below, self._cumulative, strict=True)
        )
        return (second - 2 * levels_RL * first + levels_RL**2 * zeroth).sum(dim=1)

    def least(self, scales_R: torch.Tensor, zero_points_R: torch.Tensor, num_levels: int, tried: slice) -> int:
        """Return the index of the first candidate of least error. `tried`: likely ones, which are computed first."""
        bound = self(scales_R[tried], zero_points_R[tried], num_levels).min()
        clipping_R = self._clipping(scales_R, zero_points_R, num_levels)
        kept = (clipping_R <= bound * (1 + _MARGIN)).nonzero().ravel()
        return int(kept[self(scales_R[kept], zero_points_R[kept], num_levels).argmin()])

    def _clipping(self, scales_R: torch.Tensor, zero_points_R: torch.Tensor, num_levels: int) -> torch.Tensor:
        """Return the part of the error (R,) of values beyond the first and the last level."""
        ends_R2 = torch.stack([-zero_points_R, num_levels - 1 - zero_points_R], dim=1) * scales_R[:, None]
        parts = []
        for end, below in enumerate(self._moments_below(ends_R2)):
            parts.append(torch.stack([below[:, 0], self._cumulative[end][-1] - below[:, 1]], dim=1))
        zeroth, first, second = parts
        return (second - 2 * ends_R2 * first + ends_R2**2 * zeroth).sum(dim=1)

    def _moments_below(self, x: torch.Tensor) -> list[torch.Tensor]:
        index = (x / self._bin_width).clamp_(-MAX_INDEX, MAX_INDEX).long() + MAX_INDEX
        low, width = self._edges_E[index], self._edges_E[index + 1] - self._edges_E[index]
        # Equal values at an end of the range are a bin without width: all of them are below, or none.
        fraction = torch.where(width > 0, (x - low) / width, (x >= low).double()).clamp_(0, 1)
        moments = _moments(fraction * self._counts_C[index], low, low + fraction * width)
        return [sums[index] + moment for sums, moment in zip(self._cumulative, moments, strict=True)]


def _moments(counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the sums of x^p, for p = 0, 1, 2, of so many values that are uniform between `low` and `high`."""
    return counts, counts * (low + high) / 2, counts * (low**2 + low * high + high**2) / 3
