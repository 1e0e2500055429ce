"""Exact counts of a tensor's values in bins of fixed edges, and the observer that keeps them.

The width of a bin is a power of two, and bins are multiples of it: value x belongs to bin trunc(x / width). Scaling by
a power of two is exact, and halving an index gives the bin of twice the width, so two bins become one exactly where
the range has doubled. The counts are therefore a function of the values alone: neither their order, nor batches, nor
the number of workers that counted parts of them changes a bit, and one pass suffices.

Shape legend: C bins, E their edges (C + 1).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    from torch.ao.quantization.observer import UniformQuantizationObserverBase

MAX_INDEX = 2047
"""Index of the last bin; that of the first one is its negative, so 1,024 to 2,047 bins lie on the wider side of 0."""
NUM_BINS = 2 * MAX_INDEX + 1
EVERYTHING = -math.inf, math.inf
"""A range without limits."""
_MIN_EXPONENT = -40
"""The narrowest bins: far below torch's smallest scale, 2^-23."""
_MAX_CHOSEN = 4096
_chosen_ranges: dict[Hashable, torch.Tensor] = {}
"""By what they follow from: a search takes 4 ms, and a network is converted again in each trial, check and export."""
# Elements that are counted at once: their temporary values stay in a processor's cache.
_PART_SIZE = 1 << 17
# Successive equal values (zeros behind a ReLU) are counted in turn: adding to the number just stored would stall.
_NUM_TURNS = 2


class Histogram(NamedTuple):
    """Values other than zero, taken to be uniform within each bin; outer edges are the minimum and maximum."""

    counts_C: torch.Tensor
    edges_E: torch.Tensor
    bin_width: float
    """Of all bins within the range but the one around zero, which has twice that."""


class CountingObserver(UniformQuantizationObserverBase):
    """Counts values and records their minimum and maximum; subclasses choose a range by the counts.

    Where a value is not finite, the range shows it, and nothing is counted from there on.
    """

    min_val: torch.Tensor
    max_val: torch.Tensor
    exponent: torch.Tensor
    """A bin is 2^exponent wide, the one around zero twice that."""
    num_zeros: torch.Tensor
    """How many of the values in the bin around zero are zero: they have no quantization error on any grid."""
    counts_C: torch.Tensor
    read_range: tuple[float, float] = EVERYTHING
    """Values beyond are counted, but the range is chosen as if they lay at its ends."""
    settings: tuple[float, ...] = ()
    """What the range follows from beside the counts and the number of levels."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("min_val", torch.tensor(torch.inf))
        self.register_buffer("max_val", torch.tensor(-torch.inf))
        self.register_buffer("exponent", torch.tensor(_MIN_EXPONENT))
        self.register_buffer("num_zeros", torch.tensor(0))
        self.register_buffer("counts_C", torch.zeros(NUM_BINS, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Observe `x`; return it unchanged."""
        self.observe(x.detach())
        return x

    def observe(self, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        """Count the values of `x`. Returns their minimum and maximum, shape (2,); (inf, -inf) of an empty tensor.

        `stride`: of a tensor of four axes or more, (B, C, H, W) for example, count all channels at one of so many
        positions, so many times. The minimum and maximum are of all values.
        """
        values = in_memory_order(x).float()
        limits = min_max_of(values)
        if has_range(limits) and self.extend(limits):
            if stride > 1:
                values = in_memory_order(x.flatten(2)[..., stride // 2 :: stride]).float()
            self.num_zeros += stride * _count(values, limits, int(self.exponent), self.counts_C, stride)
        return limits

    def extend(self, limits: torch.Tensor) -> bool:
        """Extend the range by `limits`, shape (2,), which doubles bins as required. Returns whether it is finite."""
        self.min_val.copy_(torch.minimum(limits[0], self.min_val))
        self.max_val.copy_(torch.maximum(limits[1], self.max_val))
        low, high = self.min_val.item(), self.max_val.item()
        if not (math.isfinite(low) and math.isfinite(high)):
            return False
        max_abs = max(-low, high)
        exponent = max(math.frexp(max_abs)[1] - MAX_INDEX.bit_length(), _MIN_EXPONENT) if max_abs else _MIN_EXPONENT
        num_doublings = exponent - int(self.exponent)
        if num_doublings > 0:
            self.counts_C.copy_(_with_doubled_bins(self.counts_C, num_doublings))
            self.exponent.fill_(exponent)
        return True

    def add(self, num_zeros: torch.Tensor, counts_C: torch.Tensor) -> None:
        """Add counts in bins of the present width; `extend` makes them so."""
        self.num_zeros += num_zeros
        self.counts_C += counts_C

    def histogram(self) -> Histogram:
        """Return the counts of all values but zero, in float64, with edges within the range."""
        counts_C = self.counts_C.double()
        counts_C[MAX_INDEX] -= self.num_zeros
        inner = torch.arange(1, MAX_INDEX + 2, dtype=torch.float64)
        bin_width = 2.0 ** int(self.exponent)
        edges_E = torch.cat([-inner.flip(0), inner]) * bin_width
        low, high = (limit.clamp(*self.read_range).item() for limit in (self.min_val, self.max_val))
        return Histogram(counts_C, edges_E.clamp_(low, high), bin_width)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]  # torch.ao is partly typed
        """Return scale and zero point of the chosen range."""
        limits = torch.stack([self.min_val, self.max_val])
        if limits.isfinite().all():
            limits = limits.clamp(*self.read_range)
            if limits[0] < limits[1]:
                limits = self._chosen_range(limits.double()).to(self.min_val.dtype)
        qparams: tuple[torch.Tensor, torch.Tensor] = self._calculate_qparams(limits[0], limits[1])
        return qparams

    def _chosen_range(self, limits: torch.Tensor) -> torch.Tensor:
        histogram = self.histogram()
        digest = hashlib.sha256(histogram.counts_C.numpy().tobytes())
        digest.update(histogram.edges_E.numpy().tobytes())
        key = (digest.digest(), type(self), self.settings, self.quant_min, self.quant_max)
        if key not in _chosen_ranges:
            if len(_chosen_ranges) == _MAX_CHOSEN:
                _chosen_ranges.clear()
            _chosen_ranges[key] = self.choose_range(histogram, limits)
        return _chosen_ranges[key]

    def choose_range(self, histogram: Histogram, limits: torch.Tensor) -> torch.Tensor:
        """Return the range to quantize, shape (2,), of values with this minimum and a greater maximum."""
        raise NotImplementedError


def min_max_of(x: torch.Tensor) -> torch.Tensor:
    """Return the minimum and maximum of `x`, shape (2,); (inf, -inf) if it has no value."""
    if not x.numel():
        return torch.tensor([torch.inf, -torch.inf])
    return torch.stack(torch.aminmax(in_memory_order(x)))


def has_range(limits: torch.Tensor) -> torch.Tensor:
    """Return whether `limits`, of shape (..., 2), are the minimum and maximum of at least one value (NaN included)."""
    return ~(limits[..., 0] > limits[..., 1])


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory, which needs no copy of a channels-last tensor."""
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).reshape(-1)


def _count(values: torch.Tensor, limits: torch.Tensor, exponent: int, counts_C: torch.Tensor, times: int) -> int:
    """Add the counts of flat values within `limits` to `counts_C`, so many times. Returns how many values are zero."""
    bins_per_unit = 2.0**-exponent
    first, last = (math.trunc(limit * bins_per_unit) for limit in limits.tolist())
    num_bins = last - first + 1
    size = min(len(values), _PART_SIZE)
    scaled, indices = torch.empty(size), torch.empty(size, dtype=torch.int16)
    found, num_nonzero = torch.zeros(_NUM_TURNS * num_bins, dtype=torch.int64), 0
    for part in torch.split(values, size):
        num = len(part)
        indices[:num].copy_(torch.mul(part, bins_per_unit, out=scaled[:num]))  # which truncates
        if first:
            indices[:num].sub_(first)
        torch.add(_turns(_PART_SIZE)[:num], indices[:num], alpha=_NUM_TURNS, out=indices[:num])
        found += torch.bincount(indices[:num], minlength=len(found))
        signs = torch.sign(part, out=scaled[:num])
        num_nonzero += int(signs.dot(signs))
    counts_C[MAX_INDEX + first : MAX_INDEX + last + 1] += times * found.view(num_bins, _NUM_TURNS).sum(1)
    return len(values) - num_nonzero


@functools.cache
def _turns(num: int) -> torch.Tensor:
    return (torch.arange(num) % _NUM_TURNS).to(torch.int16)


def _with_doubled_bins(counts_C: torch.Tensor, num_doublings: int) -> torch.Tensor:
    indices_C = torch.arange(-MAX_INDEX, MAX_INDEX + 1)
    factor = 2 ** min(num_doublings, MAX_INDEX.bit_length())
    wider_C = torch.div(indices_C, factor, rounding_mode="trunc") + MAX_INDEX
    return torch.zeros_like(counts_C).index_add_(0, wider_C, counts_C)
