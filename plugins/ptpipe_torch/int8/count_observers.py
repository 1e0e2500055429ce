"""Observers that choose a range by the counts of values: least squared error, percentiles, least divergence.

All three keep the same counts. Zeros are left out: zero is a level of every grid, and half of a ReLU's outputs would
otherwise decide.

Shape legend: C histogram bins, E their edges (C + 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ptpipe_torch.int8.squared_error import least_error_range
from ptpipe_torch.int8.value_counts import CountingObserver, Histogram

DEFAULT_PERCENTILE = 99.99
_NUM_LEVELS = 256
_MAX_THRESHOLDS = 128
_SMOOTHING = 1e-4  # as in the source of the formula


class MseObserver(CountingObserver):
    """Chooses the range of least mean squared quantization error."""

    def choose_range(self, histogram: Histogram, limits: torch.Tensor) -> torch.Tensor:
        return least_error_range(histogram, limits, self.quant_max - self.quant_min + 1)


class PercentileObserver(CountingObserver):
    """Chooses the range from the (100 - p)-th to the p-th percentile of the values other than zero."""

    def __init__(self, percentile: float = DEFAULT_PERCENTILE, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.percentile = percentile
        self.settings = (percentile,)

    def choose_range(self, histogram: Histogram, limits: torch.Tensor) -> torch.Tensor:
        fraction = self.percentile / 100
        counts_C, edges_E = histogram.counts_C, histogram.edges_E
        low, high = -_quantile(counts_C.flip(0), -edges_E.flip(0), fraction), _quantile(counts_C, edges_E, fraction)
        return torch.stack([low, high])


class EntropyObserver(CountingObserver):
    """Chooses the threshold T of least divergence between the values and their quantized form.

    The range is -T to T, within the minimum and maximum. Formula: S. Migacz, 8-bit Inference with TensorRT, GPU
    Technology Conference 2017 (S7310), "Entropy Calibration": the Kullback-Leibler divergence of the distribution up to
    T, values beyond it counted at its ends, from the same distribution rounded to 256 levels. (There 128, those of
    int8 on one side of zero; on a range of one side they clip what 256 levels hold without loss: bytes.)
    """

    def choose_range(self, histogram: Histogram, limits: torch.Tensor) -> torch.Tensor:
        low, high = limits.tolist()
        counts_C, edges_E = histogram.counts_C.numpy(), histogram.edges_E.numpy()
        middles_C = (edges_E[:-1] + edges_E[1:]) / 2
        ranges = [(max(low, -threshold), min(high, threshold)) for threshold in _thresholds(edges_E)]
        divergences = [_divergence(counts_C, middles_C, *range_) for range_ in ranges]
        return torch.tensor(ranges[int(np.argmin(divergences))], dtype=torch.float64)


def _quantile(counts_C: torch.Tensor, edges_E: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the least value that this fraction of all values does not exceed."""
    cumulative_C = counts_C.cumsum(0)
    target = fraction * cumulative_C[-1]
    index = int(torch.searchsorted(cumulative_C, target).clamp_(max=len(counts_C) - 1))
    low, high = edges_E[index], edges_E[index + 1]
    return high - (high - low) * (cumulative_C[index] - target) / counts_C[index]


def _thresholds(edges_E: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the candidates, ascending: edges with at least one bin per level below them, evenly selected."""
    sizes = np.unique(np.abs(edges_E))
    sizes = sizes[min(_NUM_LEVELS, len(sizes) - 1) :]
    return sizes[np.linspace(0, len(sizes) - 1, min(_MAX_THRESHOLDS, len(sizes))).round().astype(np.int64)]


def _divergence(
    counts_C: npt.NDArray[np.float64], middles_C: npt.NDArray[np.float64], low: float, high: float
) -> float:
    """Return the divergence, in nats, of all values, clipped to the range, from those within it, rounded."""
    first, end = np.searchsorted(middles_C, low), np.searchsorted(middles_C, high, side="right")
    kept_C = counts_C[first:end]
    clipped_C = kept_C.copy()
    clipped_C[0] += counts_C[:first].sum()
    clipped_C[-1] += counts_C[end:].sum()
    occupied_C = np.flatnonzero(clipped_C)
    levels = np.rint((middles_C[first:end][occupied_C] - low) * ((_NUM_LEVELS - 1) / (high - low))).astype(np.int64)
    sums, sizes = np.bincount(levels, kept_C[occupied_C]), np.bincount(levels)
    spread = (sums[levels] / sizes[levels]).clip(min=_SMOOTHING)
    # Not normalized by what was kept, or clipping everything would leave two equal distributions.
    p, q = clipped_C[occupied_C] / clipped_C.sum(), spread / clipped_C.sum()
    return float((p * np.log(p / q)).sum())
