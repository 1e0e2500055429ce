"""Judge by how much a model is worse: the work of gate.accuracy and gate.quality. Imports neither torch nor numpy.

`max_drop` is a test of non-inferiority: the samples are a draw of those that the model will see, so that a drop on them
is uncertain. It passes where the upper one-sided limit of the drop is below `max_drop`, refuses where the lower one is
above, and is undecided between them. `min_accuracy`, `min_value` and `max_value` are limits of these samples.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, StageError, Verdict
from ptpipe_eval.comparison import Comparison, Row
from ptpipe_eval.verdicts import LimitCheck, judge_all, percent, verdict

if TYPE_CHECKING:
    from ptpipe_eval.config import AccuracyConfig, QualityConfig
    from ptpipe_eval.quality.paired import Drop
    from ptpipe_torch import Metric

_ACCURACY = "accuracy"


def judge_accuracy(config: AccuracyConfig, comparison: Comparison) -> Verdict:
    """Compare accuracies with the baseline's and with a minimum."""
    comparison = _with_baseline_file(config, comparison)
    return judge_all(config, comparison, partial(_judge_accuracy, config, comparison))


def _judge_accuracy(config: AccuracyConfig, comparison: Comparison, candidate: Row) -> Verdict:
    metric, baseline = comparison.metric(_ACCURACY), comparison.row(comparison.baseline)
    own, other = (row.metrics[metric.name] for row in (candidate, baseline))
    drop = comparison.drop(candidate.name, metric)
    checks = []
    if config.max_drop is not None:
        checks.append(check_drop(comparison, candidate, metric, config.max_drop, config.confidence))
    if config.min_accuracy is not None:
        total = comparison.num_samples
        text = (
            f"{candidate.name} has {metric_text(metric, own, total)} ({round(own * total):,} of {total:,} samples), "
            f"minimum {percent(config.min_accuracy, 2)} %"
        )
        checks.append(LimitCheck(own >= config.min_accuracy, text))
    figures: dict[str, JSON] = {
        "accuracy": own,
        "baseline_accuracy": other,
        "drop": metric.drop(own, other),
        **drop_facts(drop, config.max_drop, config.confidence),
        "num_samples": comparison.num_samples,
        "min_accuracy": config.min_accuracy,
    }
    return verdict(checks, candidate, baseline, figures, fails_undecided(config, metric.drop(own, other)))


def judge_quality(config: QualityConfig, comparison: Comparison) -> Verdict:
    """Compare a metric with the baseline's, and with a minimum or a maximum."""
    comparison = _with_baseline_file(config, comparison)
    return judge_all(config, comparison, partial(_judge_quality, config, comparison))


def _judge_quality(config: QualityConfig, comparison: Comparison, candidate: Row) -> Verdict:
    metric, baseline = comparison.metric(config.metric), comparison.row(comparison.baseline)
    own, other = (row.metrics[metric.name] for row in (candidate, baseline))
    _check_direction(config, metric)
    drop, total = comparison.drop(candidate.name, metric), comparison.num_samples
    has, name = f"{candidate.name} has {metric_text(metric, own, total)}", metric.name.replace("_", " ")
    checks = []
    if config.max_drop is not None:
        checks.append(check_drop(comparison, candidate, metric, config.max_drop, config.confidence))
    if config.min_value is not None:
        text = f"{has} {name}, minimum {metric_text(metric, config.min_value, total)}"
        checks.append(LimitCheck(own >= config.min_value, text))
    if config.max_value is not None:
        text = f"{has} {name}, maximum {metric_text(metric, config.max_value, total)}"
        checks.append(LimitCheck(own <= config.max_value, text))
    figures: dict[str, JSON] = {
        "metric": metric.name,
        "value": own,
        "baseline_value": other,
        metric.drop_name: metric.drop(own, other),
        **drop_facts(drop, config.max_drop, config.confidence),
        "num_samples": total,
        "min_value": config.min_value,
        "max_value": config.max_value,
    }
    return verdict(checks, candidate, baseline, figures, fails_undecided(config, metric.drop(own, other)))


def _check_direction(config: QualityConfig, metric: Metric) -> None:
    """Raise StageError where every worse model meets the limit."""
    wrong, right = ("max_value", "min_value") if metric.higher_is_better else ("min_value", "max_value")
    if getattr(config, wrong) is not None and getattr(config, right) is None and config.max_drop is None:
        better = "higher" if metric.higher_is_better else "lower"
        raise StageError(f"{better} {metric.name} is better, and every worse model meets {wrong}: give {right}")


def _with_baseline_file(config: AccuracyConfig | QualityConfig, comparison: Comparison) -> Comparison:
    """Return the comparison with the accepted model in the baseline's place, where the manifest names one."""
    if config.baseline_file is None:
        return comparison
    from ptpipe_eval.baseline.file import Baseline
    from ptpipe_eval.baseline.judge import against, check_metric
    from ptpipe_eval.config import QualityConfig

    accepted = Baseline.read(Path(config.baseline_file).expanduser())
    compared = against(accepted, comparison, config.names)
    if isinstance(config, QualityConfig) and config.max_drop is not None:
        check_metric(accepted, compared.metric(config.metric))
    return compared


def check_drop(
    comparison: Comparison, candidate: Row, metric: Metric, max_drop: float, confidence: float
) -> LimitCheck:
    """Test whether the candidate is worse than the baseline by less than `max_drop`."""
    drop = comparison.drop(candidate.name, metric)
    start = _difference(comparison, candidate, metric)
    if drop is None:
        return LimitCheck(None, f"{start}; its interval is not known: {_why_unknown(comparison, metric)}")
    low, high = drop.limits(confidence)
    is_met = True if high < max_drop else False if low > max_drop else None
    number = _Number(metric, comparison.num_samples)
    range_text = {
        True: f"drop at most {number(high)}" if high >= 0 else f"gain at least {number(-high)}",
        False: f"drop at least {number(low)}",
        None: f"drop between {number(low)} and {number(high)}",
    }[is_met]
    text = (
        f"{start} ({range_text} with {percent(confidence)} % confidence), allowed {number.limit(max_drop)}: "
        f"{_values(comparison, candidate, metric, drop)}"
    )
    return LimitCheck(is_met, text if is_met is not None else f"{text}; {_needed(drop, max_drop, confidence)}")


def _why_unknown(comparison: Comparison, metric: Metric) -> str:
    if comparison.samples is None:
        return "the comparison has no facts of single samples"
    if metric.name in comparison.samples.too_large:
        return "too many samples for the memory that one may take"
    return "these samples can't show one"


def fails_undecided(config: AccuracyConfig | QualityConfig, drop: float) -> bool:
    """Return whether an undecided gate ends the run."""
    if config.on_inconclusive == "estimate":
        return config.max_drop is not None and drop > config.max_drop
    return config.on_inconclusive == "fail"


def drop_text(metric: Metric, value: float, num_samples: int) -> str:
    """Format a difference of a metric: of a fraction, in points."""
    return _Number(metric, num_samples)(value)


def limit_text(metric: Metric, value: float, num_samples: int) -> str:
    """Format what the user wrote, with all its digits."""
    return _Number(metric, num_samples).limit(value)


class _Number:
    """Formats differences of a metric: those of a fraction in points, with digits for a single sample."""

    def __init__(self, metric: Metric, num_samples: int) -> None:
        self.is_fraction = metric.is_fraction
        self.decimals = max(2, len(str(num_samples - 1)) - 2)

    def __call__(self, value: float) -> str:
        if not self.is_fraction:
            return f"{value:.3g}"
        return f"{round(100 * value, self.decimals) + 0.0:.{self.decimals}f}"  # + 0.0: never `-0.00`

    def limit(self, value: float) -> str:
        """Format what the user wrote, with all its digits."""
        return percent(value, 2) if self.is_fraction else f"{value:.6g}"


def _difference(comparison: Comparison, candidate: Row, metric: Metric) -> str:
    """Return `int8 loses 0.12 points of accuracy against float`."""
    baseline = comparison.row(comparison.baseline)
    drop = metric.drop(candidate.metrics[metric.name], baseline.metrics[metric.name])
    size, name = _Number(metric, comparison.num_samples)(abs(drop)), metric.name.replace("_", " ")
    if metric.is_fraction:
        return f"{candidate.name} {'loses' if drop >= 0 else 'gains'} {size} points of {name} against {baseline.name}"
    return f"{candidate.name} is {size} {'worse' if drop >= 0 else 'better'} in {name} than {baseline.name}"


def _values(comparison: Comparison, candidate: Row, metric: Metric, drop: Drop) -> str:
    """Return `98.90 % vs 99.02 %, 17 lost and 5 gained of 10,000 samples`."""
    baseline, total = comparison.row(comparison.baseline), comparison.num_samples
    own, other = (metric_text(metric, row.metrics[metric.name], total) for row in (candidate, baseline))
    lost, gained = getattr(drop, "num_lost", None), getattr(drop, "num_gained", None)
    counts = f"{total:,} samples" if lost is None else f"{lost:,} lost and {gained:,} gained of {total:,} samples"
    return f"{own} vs {other}, {counts}"


def _needed(drop: Drop, max_drop: float, confidence: float) -> str:
    number = drop.num_samples_needed(max_drop, confidence)
    too_few = f"{drop.num_samples:,} samples are too few to tell"
    if max_drop <= 0 and drop.drop <= max_drop:
        return f"{too_few}, and no number shows that nothing at all is lost: allow a small drop"
    if number is None:
        return too_few
    would_do = "would show that it is more" if drop.drop > max_drop else "would do"
    return f"{too_few}, about {_rounded(max(number, drop.num_samples + 1)):,} {would_do}"


def _rounded(number: int) -> int:
    """Return the number with two digits that count, rounded up."""
    unit = int(10 ** max(0, len(str(number)) - 2))
    return -(-number // unit) * unit


def drop_facts(drop: Drop | None, max_drop: float | None, confidence: float) -> dict[str, JSON]:
    """Return what a verdict has of the test of a drop."""
    low, high = (None, None) if drop is None else drop.limits(confidence)
    needed = None if drop is None or max_drop is None else drop.num_samples_needed(max_drop, confidence)
    return {
        "drop_low": low,
        "drop_high": high,
        "confidence": confidence,
        "max_drop": max_drop,
        "num_samples_needed": needed,
    }


def metric_text(metric: Metric, value: float, num_samples: int) -> str:
    """Format a value of a metric: of a fraction, in percent, with digits for a single sample."""
    decimals = max(2, len(str(num_samples - 1)) - 2)
    return f"{100 * value:.{decimals}f} %" if metric.is_fraction else f"{value:.5g}"
