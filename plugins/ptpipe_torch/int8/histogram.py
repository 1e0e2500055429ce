"""An observer that selects the range of least mean squared quantization error over a histogram.

torch's `HistogramObserver` narrows the range greedily, for 256 levels whatever `quant_max` is, and stops at the first
step that does not help: its error can be many times the least one. Here the error of a candidate range is computed
exactly for values that are uniform within each bin, rounding and clipping in one formula, and all candidates of a
grid are compared. Zeros are not counted: zero is representable in every range, hence without error, and half of a
ReLU's outputs would count as small values of their bin.

Shape legend: C histogram bins, R candidate ranges, L levels (integers of the quantized type).
"""

from __future__ import annotations

import torch

from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    from torch.ao.quantization import HistogramObserver

# Elements that are counted at once: their temporary values stay in a processor's cache.
_PART_SIZE = 1 << 16
# The grid: the range's ends times 1, 1 / 1.3, ..., 1 / 1.3^20 = 1 / 190; then twice a finer one around the best.
_RATIO, _NUM_STEPS = 1.3, 21
_FINER_RATIOS, _FINER_STEPS = (_RATIO**0.25, _RATIO**0.0625), 4


class MinErrorHistogramObserver(HistogramObserver):
    """A histogram of all values but zero, over the range of finite values; infinite ones count as its ends.

    When the range grows, counts are redistributed as if values were uniform within each bin.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Observe `x`; return it unchanged."""
        limits = min_max_of(x.detach(), ignore_infinite=True)
        if has_range(limits):
            limits = self.extended_limits(limits)
            self.merge(limits, self.counts(x.detach(), limits))
        return x

    def extended_limits(self, limits: torch.Tensor) -> torch.Tensor:
        """Return the observed range, extended by `limits`; both of shape (2,)."""
        return torch.stack([torch.minimum(limits[0], self.min_val), torch.maximum(limits[1], self.max_val)])

    def counts(self, x: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return the counts (C,) of nonzero values of `x` in bins between `limits[0]` and `limits[1]`.

        None are counted in a range that is not a number.
        """
        if not limits.isfinite().all():
            return torch.zeros(self.bins)
        min_val, max_val = (float(limit) for limit in limits)
        bins_per_unit = self.bins / (max_val - min_val) if max_val > min_val else 1.0
        bins_per_unit = min(bins_per_unit, torch.finfo(torch.float32).max)  # infinite times zero is not a number

        def bins_of(values: torch.Tensor) -> torch.Tensor:
            return (values - min_val).mul_(bins_per_unit).clamp_(0, self.bins - 1).to(torch.int32)

        counts_C, num_zeros = torch.zeros(self.bins, dtype=torch.int64), 0
        for part in torch.split(_flat(x), _PART_SIZE):
            counts_C += torch.bincount(bins_of(part), minlength=self.bins)
            num_zeros += len(part) - int(part.sign().abs_().sum())
        if num_zeros:
            counts_C[int(bins_of(x.new_zeros(1)))] -= num_zeros
        return counts_C.float()

    def merge(self, limits: torch.Tensor, counts_C: torch.Tensor) -> None:
        """Extend the range to `limits`, shape (2,), and add counts of bins between them."""
        before, before_C = torch.stack([self.min_val, self.max_val]), self.histogram.double()
        if limits.isfinite().all() and before.isfinite().all() and not torch.equal(before, limits):
            before_C = _redistributed(before_C, before.tolist(), limits.tolist())
        self.histogram.copy_(before_C + counts_C)
        self.min_val.copy_(limits[0])
        self.max_val.copy_(limits[1])

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]  # torch.ao is partly typed
        """Return scale and zero point of least error."""
        limits = torch.stack([self.min_val, self.max_val])
        if not has_range(limits) or not limits.isfinite().all():
            qparams: tuple[torch.Tensor, torch.Tensor] = super().calculate_qparams()
            return qparams
        best = _min_error_range(self.histogram, limits, self.quant_max - self.quant_min + 1)
        return self._calculate_qparams(*best.to(self.min_val.dtype))


def min_max_of(x: torch.Tensor, *, ignore_infinite: bool = False) -> torch.Tensor:
    """Return the minimum and maximum of `x`, shape (2,); (inf, -inf) if it has no value."""
    if not x.numel():
        return torch.tensor([torch.inf, -torch.inf])
    limits = torch.stack(torch.aminmax(x))
    if ignore_infinite and limits.isinf().any():
        return min_max_of(x[x.abs() != torch.inf])
    return limits


def has_range(limits: torch.Tensor) -> bool:
    """Return whether `limits`, of shape (2,), are the minimum and maximum of at least one value (NaN included)."""
    return not limits[0] > limits[1]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory, which needs no copy of a channels-last tensor."""
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).reshape(-1)


def _redistributed(counts_C: torch.Tensor, before: list[float], limits: list[float]) -> torch.Tensor:
    """Return the counts in bins of the wider range `limits`, of values that are uniform within their bin `before`."""
    num_bins = len(counts_C)
    edges = torch.linspace(limits[0], limits[1], num_bins + 1, dtype=torch.float64)
    if before[0] == before[1]:  # all values are equal
        moved_C = torch.zeros_like(counts_C)
        moved_C[int(torch.bucketize(before[0], edges[1:-1], right=True))] = counts_C.sum()
        return moved_C
    position = ((edges - before[0]) * (num_bins / (before[1] - before[0]))).clamp_(0, num_bins)
    index = position.long().clamp_(max=num_bins - 1)
    return (_cumulative(counts_C)[index] + (position - index) * counts_C[index]).diff()


def _cumulative(values_C: torch.Tensor) -> torch.Tensor:
    return torch.cat([values_C.new_zeros(1), values_C.cumsum(0)])


def _min_error_range(counts_C: torch.Tensor, limits: torch.Tensor, num_levels: int) -> torch.Tensor:
    """Return the range, shape (2,) and including zero, with the least squared error of `num_levels` levels.

    Both ends are multiples of the scale, so that the zero point is an integer.
    """
    ends = torch.stack([limits[0].clamp(max=0), limits[1].clamp(min=0)]).double()
    if ends[0] == ends[1] or limits[0] == limits[1]:
        return ends
    error_of = _QuantizationError(counts_C.double(), limits.double())
    fractions = [_RATIO ** -torch.arange(_NUM_STEPS, dtype=torch.float64)] * 2
    for finer in (*_FINER_RATIOS, None):
        grid_R2 = torch.cartesian_prod(*(part if end else part[:1] for part, end in zip(fractions, ends, strict=True)))
        scales_R = (grid_R2 * ends).diff(dim=1)[:, 0] / (num_levels - 1)
        zero_points_R = (-grid_R2[:, 0] * ends[0] / scales_R).round()
        best = int(error_of(scales_R, zero_points_R, num_levels).argmin())
        if finer is not None:
            steps = finer ** torch.arange(-_FINER_STEPS, _FINER_STEPS + 1, dtype=torch.float64)
            fractions = [(steps * fraction).clamp_(max=1) for fraction in grid_R2[best]]
    first, last = -zero_points_R[best], num_levels - 1 - zero_points_R[best]
    return torch.stack([first, last]) * scales_R[best]


class _QuantizationError:
    """Sum of squared differences between values with this histogram, uniform in each bin, and the nearest level."""

    def __init__(self, counts_C: torch.Tensor, limits: torch.Tensor) -> None:
        num_bins = len(counts_C)
        self._min, self._bin_width = limits[0], (limits[1] - limits[0]) / num_bins
        self._edges = self._min + self._bin_width * torch.arange(num_bins + 1, dtype=torch.float64)
        self._density_C = counts_C / self._bin_width
        moments = [counts_C, *(self._density_C * (self._edges**power).diff() / power for power in (2, 3))]
        self._cumulative = [_cumulative(moment_C) for moment_C in moments]
        """Integrals of density * x^p up to each edge, for p = 0, 1, 2."""

    def __call__(self, scales_R: torch.Tensor, zero_points_R: torch.Tensor, num_levels: int) -> torch.Tensor:
        """Return the error (R,) with the levels (integer - zero point) * scale; values beyond the ends are clipped."""
        levels_RL = (torch.arange(num_levels) - zero_points_R[:, None]) * scales_R[:, None]
        below = self._moments_below((levels_RL[:, 1:] + levels_RL[:, :-1]) / 2)
        zeroth, first, second = (
            torch.cat([moment[:, :1], moment.diff(dim=1), total[-1] - moment[:, -1:]], dim=1)
            for moment, total in zip(below, self._cumulative, strict=True)
        )
        return (second - 2 * levels_RL * first + levels_RL**2 * zeroth).sum(dim=1)

    def _moments_below(self, x: torch.Tensor) -> list[torch.Tensor]:
        num_bins = len(self._density_C)
        position = ((x - self._min) / self._bin_width).clamp_(0, num_bins)
        index = position.long().clamp_(max=num_bins - 1)
        edge, density = self._edges[index], self._density_C[index]
        end = edge + (position - index) * self._bin_width
        integrals = (end - edge, (end**2 - edge**2) / 2, (end**3 - edge**3) / 3)
        return [sums[index] + density * integral for sums, integral in zip(self._cumulative, integrals, strict=True)]
