"""Judge a comparison: the work of the gates. Imports neither torch nor numpy.

A value equal to its limit passes: a loss of 30 of 10,000 samples meets a limit of 0.003. Fractions are therefore
quotients of counts, which Python rounds to the same float as the limit in the manifest, and the difference of two
metrics is rounded to twelve digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from ptpipe import JSON, Decision, Verdict
from ptpipe_eval.comparison import Comparison, Row

if TYPE_CHECKING:
    from ptpipe_eval.config import AccuracyConfig, QualityConfig, SizeConfig
    from ptpipe_torch import Metric


_ACCURACY = "accuracy"


@dataclass(frozen=True)
class LimitCheck:
    """One value compared with its limit."""

    is_met: bool
    reason: str


def judge_accuracy(config: AccuracyConfig, comparison: Comparison) -> Verdict:
    """Compare the candidate's accuracy with the baseline's and with a minimum."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    comparison.metric(_ACCURACY)
    total = comparison.num_samples
    num_correct, num_correct_baseline = (round(row.metrics[_ACCURACY] * total) for row in (candidate, baseline))
    num_lost = num_correct_baseline - num_correct
    own = f"{_points(num_correct, total)} %"
    checks = []
    if config.max_drop is not None:
        text = (
            f"{candidate.name} {'loses' if num_lost >= 0 else 'gains'} {_points(abs(num_lost), total)} points "
            f"({abs(num_lost)} of {total:,} samples) against {baseline.name}: {own} vs "
            f"{_points(num_correct_baseline, total)} %, allowed {_percent(config.max_drop, 2)}"
        )
        checks.append(LimitCheck(num_lost / total <= config.max_drop, text))
    if config.min_accuracy is not None:
        text = (
            f"{candidate.name} has {own} ({num_correct:,} of {total:,} samples), "
            f"minimum {_percent(config.min_accuracy, 2)} %"
        )
        checks.append(LimitCheck(num_correct / total >= config.min_accuracy, text))
    figures: dict[str, JSON] = {
        "accuracy": num_correct / total,
        "baseline_accuracy": num_correct_baseline / total,
        "drop": num_lost / total,
        "num_samples": total,
        "max_drop": config.max_drop,
        "min_accuracy": config.min_accuracy,
    }
    return _verdict(checks, candidate, baseline, figures)


def judge_quality(config: QualityConfig, comparison: Comparison) -> Verdict:
    """Compare the candidate's metric with the baseline's, and with a minimum or a maximum."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    metric = comparison.metric(config.metric)
    own, other = candidate.metrics[metric.name], baseline.metrics[metric.name]
    drop = metric.drop(own, other)
    name, has = metric.name.replace("_", " "), f"{candidate.name} has {_metric_text(metric, own)}"
    checks = []
    if config.max_drop is not None:
        text = (
            f"{candidate.name} is {_difference_text(metric, abs(drop))} {'worse' if drop >= 0 else 'better'} in {name} "
            f"than {baseline.name}: {_metric_text(metric, own)} vs {_metric_text(metric, other)}, "
            f"allowed {_difference_text(metric, config.max_drop)}"
        )
        checks.append(LimitCheck(drop <= config.max_drop, text))
    if config.min_value is not None:
        text = f"{has} {name}, minimum {_metric_text(metric, config.min_value)}"
        checks.append(LimitCheck(own >= config.min_value, text))
    if config.max_value is not None:
        text = f"{has} {name}, maximum {_metric_text(metric, config.max_value)}"
        checks.append(LimitCheck(own <= config.max_value, text))
    figures: dict[str, JSON] = {
        "metric": metric.name,
        "value": own,
        "baseline_value": other,
        "drop" if metric.is_fraction else "worse_by": drop,
        "num_samples": comparison.num_samples,
        "max_drop": config.max_drop,
        "min_value": config.min_value,
        "max_value": config.max_value,
    }
    return _verdict(checks, candidate, baseline, figures)


def judge_size(config: SizeConfig, comparison: Comparison) -> Verdict:
    """Compare the candidate's size with the baseline's and with a maximum."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    own, other = candidate.size_bytes, baseline.size_bytes
    checks = []
    if config.max_ratio is not None:
        allowed = int(_decimal(config.max_ratio) * other)
        text = (
            f"{candidate.name} has {own:,} bytes, {100 * own / other:.2f} % of {baseline.name}'s {other:,}, "
            f"allowed {_percent(config.max_ratio)} % ({allowed:,} bytes)"
        )
        checks.append(LimitCheck(own / other <= config.max_ratio, text))
    if config.max_bytes is not None:
        text = f"{candidate.name} has {own:,} bytes, allowed {config.max_bytes:,}"
        checks.append(LimitCheck(own <= config.max_bytes, text))
    figures: dict[str, JSON] = {
        "size_bytes": own,
        "baseline_size_bytes": other,
        "size_ratio": own / other,
        "max_ratio": config.max_ratio,
        "max_bytes": config.max_bytes,
    }
    return _verdict(checks, candidate, baseline, figures)


def _verdict(checks: Sequence[LimitCheck], candidate: Row, baseline: Row, figures: dict[str, JSON]) -> Verdict:
    violated = [check for check in checks if not check.is_met]
    reason = "; ".join(check.reason for check in violated or checks)
    facts: dict[str, JSON] = {"candidate": candidate.name, "baseline": baseline.name}
    return Verdict(Decision.REFUSED if violated else Decision.PASSED, reason, facts | figures)


def _decimal(limit: float) -> Decimal:
    return Decimal(repr(limit))  # the shortest decimal that parses to this float: what the user wrote


def _percent(fraction: float, min_decimals: int = 0) -> str:
    """Format a limit in percent with all its digits: 0.003 is `0.30`."""
    percent = (_decimal(fraction) * 100).normalize()
    exponent = percent.as_tuple().exponent
    assert isinstance(exponent, int), f"{fraction} is not a number"
    return f"{percent:.{max(min_decimals, -exponent)}f}"


def _metric_text(metric: Metric, value: float) -> str:
    return f"{100 * value:.2f} %" if metric.is_fraction else f"{value:.5g}"


def _difference_text(metric: Metric, value: float) -> str:
    return f"{100 * value:.2f} points" if metric.is_fraction else f"{value:.3g}"


def _points(count: int, total: int) -> str:
    """Format a fraction in percent, with enough digits to show a difference of one sample."""
    return f"{100 * count / total:.{max(2, len(str(total - 1)) - 2)}f}"
