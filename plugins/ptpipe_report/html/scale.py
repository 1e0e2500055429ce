"""From values to places of a plot, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ptpipe_report.html.svg import CHARACTER_PX

_STEPS = (1, 2, 2.5, 5, 10)
_TINY, _LARGEST = 1e-290, 1e300
"""A range that can't be divided into steps, floats ending at 5e-324, and what can be added to itself."""
_MIN_ULPS = 8
"""Of a range, in units of the last place of its larger end: its ticks would be the same floats."""


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis."""

    low: float
    high: float
    ticks: tuple[float, ...]
    start_px: float
    end_px: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value; what lies outside is drawn at the edge."""
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start_px + (value - low) / (high - low) * (self.end_px - self.start_px)

    def label(self, value: float) -> str:
        """Return a tick's text, with as many decimals as its neighbors need."""
        return self._number(value).replace("-", "\N{MINUS SIGN}")

    def _number(self, value: float) -> str:
        if self.is_log or len(self.ticks) < 2:
            return f"{value:,.4g}"
        step, largest = self.ticks[1] - self.ticks[0], max(map(abs, self.ticks))
        if largest >= 1e6 or step < 1e-5:
            return f"{value:.{max(3, 2 + math.floor(math.log10(largest)) - math.floor(math.log10(step)))}g}"
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if abs(round(step * 10**decimals) - step * 10**decimals) > 1e-6:
            decimals += 1  # a step of 0.25
        return f"{value + 0.0:,.{decimals}f}"

    def has_room(self) -> bool:
        """Return whether the ticks' labels fit beside each other."""
        places_px = [self(tick) for tick in self.ticks]
        widest_px = max((len(self.label(tick)) * CHARACTER_PX for tick in self.ticks), default=0)
        return all(right - left >= widest_px for left, right in pairwise(places_px))


def horizontal_scale(
    values: Iterable[float], start_px: float, end_px: float, *, num_ticks: int = 5, is_log: bool = False
) -> Scale:
    """Return the `scale` with as many ticks as have room for their labels, about `num_ticks` at most."""
    values = [*values]
    tried = (scale(values, start_px, end_px, num_ticks=number, is_log=is_log) for number in range(num_ticks, 0, -1))
    for found in tried:
        if found.has_room():
            break
    return found


def scale(
    values: Iterable[float], start_px: float, end_px: float, *, num_ticks: int = 5, is_log: bool = False
) -> Scale:
    """Return an axis that holds all finite values to 1e300 with some room around them, larger ones at its ends."""
    finite = [
        min(max(value, -_LARGEST), _LARGEST) for value in values if math.isfinite(value) and (value > 0 or not is_log)
    ]
    low, high = min(finite, default=0.0 if not is_log else 1.0), max(finite, default=1.0)
    if is_log and high / low >= 3:
        low, high = low / 1.15, high * 1.15
        return Scale(low, high, _log_ticks(low, high), start_px, end_px, is_log=True)
    largest = max(abs(low), abs(high))
    if high - low <= max(_MIN_ULPS * math.ulp(largest), _TINY):
        half = largest / 2 if largest > _TINY else 0.5
        low, high = low - half, high + half
    step = _step((high - low) / num_ticks)
    if step < 10 and all(value == int(value) for value in finite):
        step = max(1.0, float(math.ceil(step)))  # epochs, rounds: there is nothing between two
    room = (high - low) * 0.06
    low, high = low - room, high + room
    first = math.ceil(low / step - 1e-9)
    ticks = tuple(number * step for number in range(first, math.floor(high / step + 1e-9) + 1))
    return Scale(low, high, ticks, start_px, end_px)


def _step(least: float) -> float:
    unit = 10.0 ** math.floor(math.log10(least))
    return next(factor * unit for factor in _STEPS if factor * unit >= least * 0.999)


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = tuple(factor * 10.0**power for power in powers for factor in factors)
        inside = tuple(tick for tick in ticks if low <= tick <= high)
        if len(inside) <= 7:
            return inside
    return inside[:: math.ceil(len(inside) / 6)]
