"""Decide on fewer samples than there are whether a model meets a budget.

The samples are looked at in a random order, an eighth, a quarter and a half of them first. At each look the one-sided
limits have an error of (1 - confidence) / number of looks, so that over all looks a wrong decision is no more probable
than 1 - confidence (Bonferroni): Jennison and Turnbull, "Group Sequential Methods", 2000, has sharper boundaries, which
need the joint distribution of the looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ptpipe_torch import Task
from ptpipe_torch.quality.bootstrap import Sums
from ptpipe_torch.quality.drops import finite_limits, primary_drops

_FRACTIONS = (8, 4, 2, 1)
_MIN_SAMPLES = 64


@dataclass(frozen=True)
class Judgement:
    """Whether a model meets the budget."""

    drop: float
    low: float
    high: float
    num_samples: int
    is_met: bool
    is_sure: bool
    """Whether the limits decide; else all samples were seen, and the drop on them does."""


@dataclass(frozen=True)
class Budget:
    """How much worse than the baseline a model may be."""

    task: Task
    max_drop: float
    confidence: float
    seed: int

    def judge(self, num_samples: int, sums_of: Callable[[int], tuple[Sums, Sums]]) -> Judgement:
        """Judge by as few samples as decide. `sums_of`: of the baseline and the model, for that many first samples."""
        looks = list(look_sizes(num_samples))
        confidence = 1 - (1 - self.confidence) / len(looks)
        for size in looks:
            baseline, candidate = sums_of(size)
            (drop,) = primary_drops(self.task, baseline, [candidate], self.seed)
            low, high = finite_limits(self.task, drop, confidence)
            is_sure = high < self.max_drop or low > self.max_drop
            if is_sure or size == num_samples:
                break
        is_met = high < self.max_drop if is_sure else drop.drop <= self.max_drop
        return Judgement(drop.drop, low, high, size, is_met, is_sure)


def look_sizes(num_samples: int) -> Iterator[int]:
    """Yield the numbers of samples to look at; the last is all of them."""
    for fraction in _FRACTIONS:
        size = -(-num_samples // fraction)
        if fraction == 1 or size >= _MIN_SAMPLES:
            yield size
