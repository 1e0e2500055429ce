"""Test whether models of a manifest are worse than their baseline on average over seeds. Needs scipy.special."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.special import stdtrit

from ptpipe import JSON, StageError, Verdict
from ptpipe_eval.quality.gates import drop_text, fails_undecided, limit_text
from ptpipe_eval.verdicts import LimitCheck, judge_all, percent, verdict

if TYPE_CHECKING:
    from ptpipe_eval.comparison import Comparison, Row
    from ptpipe_eval.config import AccuracyConfig, QualityConfig
    from ptpipe_eval.quality.paired import Drop
    from ptpipe_torch import Metric


_DIGITS = 12


@dataclass(frozen=True)
class SeedDrop:
    """By how much worse a model is than the baseline on average over seeds, and how sure that is.

    Two things are uncertain: other seeds make other models, and other samples show other drops. The first is Student's
    t interval of the seeds' drops; the second is the interval of one seed's drop, on average. They are independent, and
    their distances from the estimate are added as squares (Zou and Donner, "Construction of confidence limits about
    effect measures", Statistics in Medicine 27, 2008). What seed and sample do together is in both: the limits err on
    the safe side.
    """

    drops: Sequence[Drop]
    """Of each seed; at least two."""

    @property
    def drop(self) -> float:
        """The mean, rounded as `Metric.drop` is: that of equal drops is none above them."""
        return round(math.fsum(own.drop for own in self.drops) / len(self.drops), _DIGITS)

    @property
    def deviation(self) -> float:
        """The standard deviation between seeds."""
        squares = sum((own.drop - self.drop) ** 2 for own in self.drops)
        return math.sqrt(squares / (len(self.drops) - 1))

    def limits(self, confidence: float) -> tuple[float, float]:
        """Return the lower and the upper one-sided limit of the mean over all seeds and samples."""
        number = len(self.drops)
        of_seeds = float(stdtrit(number - 1, confidence)) * self.deviation / math.sqrt(number)
        limits = [own.limits(confidence) for own in self.drops]
        below = self.drop - sum(low for low, _ in limits) / number
        above = sum(high for _, high in limits) / number - self.drop
        return self.drop - math.hypot(of_seeds, below), self.drop + math.hypot(of_seeds, above)


def judge_seeds(config: AccuracyConfig | QualityConfig, comparisons: Mapping[int, Comparison]) -> Verdict:
    """Return the verdict on a gate's candidates, from the comparison of each seed.

    Raises StageError where a comparison has no interval for the metric, or no such model.
    """
    first = next(iter(comparisons.values()))

    def judge(candidate: Row) -> Verdict:
        return _judged(config, comparisons, candidate.name)

    return judge_all(config, first, judge)


def seed_drops(metric: Metric, comparisons: Mapping[int, Comparison], name: str) -> list[Drop]:
    """Return a model's drop for each seed."""
    found = [table.drop(name, metric) for table in comparisons.values()]
    known = [drop for drop in found if drop is not None]
    if len(known) < len(found):
        raise StageError(f"the drop of {name} in {metric.name} has no interval: it can't be judged")
    return known


def _judged(config: AccuracyConfig | QualityConfig, comparisons: Mapping[int, Comparison], name: str) -> Verdict:
    first = next(iter(comparisons.values()))
    metric = first.metric(getattr(config, "metric", "accuracy"))
    assert config.max_drop is not None, "checked before the runs"
    drops = SeedDrop(seed_drops(metric, comparisons, name))
    low, high = drops.limits(config.confidence)
    is_met = True if high < config.max_drop else False if low > config.max_drop else None
    total = first.num_samples
    shown = [drop_text(metric, value, total) for value in (low, high, *sorted(own.drop for own in drops.drops))]
    text = (
        f"over all seeds, of which {len(comparisons)} were run, {name} is on average "
        f"{drop_text(metric, drops.drop, total)}{' points' if metric.is_fraction else ''} worse in "
        f"{metric.name.replace('_', ' ')} than {first.baseline} (between {shown[0]} and {shown[1]} with "
        f"{percent(config.confidence)} % confidence; by seed, {shown[2]} to {shown[-1]}), allowed "
        f"{limit_text(metric, config.max_drop, total)}"
    )
    facts: dict[str, JSON] = {
        "metric": metric.name,
        metric.drop_name: drops.drop,
        "drop_low": low,
        "drop_high": high,
        "deviation_of_seeds": drops.deviation,
        "confidence": config.confidence,
        "max_drop": config.max_drop,
        "seeds": list(comparisons),
        "drops": [own.drop for own in drops.drops],
    }
    baseline = first.row(first.baseline)
    undecided = "more seeds, or more samples, would tell"
    check = LimitCheck(is_met, text if is_met is not None else f"{text}; {undecided}")
    return verdict([check], first.row(name), baseline, facts, fails_undecided(config, drops.drop))
