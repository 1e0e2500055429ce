"""What the gates say of a comparison. Imports neither torch nor numpy.

A limit passes itself: 30 samples of 10,000 keep within 0.003. For that, shares are quotients of counts, which Python
rounds as it rounds the limit when it reads the manifest; a difference of two accuracies would not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from ptpipe import JSON, Decision, Verdict
from ptpipe_eval.comparison import Comparison, Latency, Row, cell_label

if TYPE_CHECKING:
    from ptpipe_eval import AccuracyConfig, LatencyConfig, SizeConfig


@dataclass(frozen=True)
class Check:
    """One limit held against its figure."""

    kept: bool
    text: str


def judge_accuracy(config: AccuracyConfig, comparison: Comparison) -> Verdict:
    """Hold the candidate's right answers against the baseline's and against a floor."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    total, num_lost = comparison.num_samples, baseline.num_correct - candidate.num_correct
    own = f"{_points(candidate.num_correct, total)} %"
    findings = []
    if config.max_drop is not None:
        text = (
            f"{candidate.name} {'loses' if num_lost >= 0 else 'gains'} {_points(abs(num_lost), total)} points "
            f"({abs(num_lost)} of {total:,} samples) against {baseline.name}: {own} vs "
            f"{_points(baseline.num_correct, total)} %, allowed {_percent(config.max_drop, 2)}"
        )
        findings.append(Check(num_lost / total <= config.max_drop, text))
    if config.min_accuracy is not None:
        text = (
            f"{candidate.name} has {own} ({candidate.num_correct:,} of {total:,} samples), "
            f"asked for {_percent(config.min_accuracy, 2)} %"
        )
        findings.append(Check(comparison.accuracy(candidate) >= config.min_accuracy, text))
    figures: dict[str, JSON] = {
        "accuracy": comparison.accuracy(candidate),
        "baseline_accuracy": comparison.accuracy(baseline),
        "drop": num_lost / total,
        "num_samples": total,
        "max_drop": config.max_drop,
        "min_accuracy": config.min_accuracy,
    }
    return _verdict(findings, candidate, baseline, figures)


def judge_size(config: SizeConfig, comparison: Comparison) -> Verdict:
    """Hold the candidate's bytes against the baseline's and against a ceiling."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    own, other = candidate.size_bytes, baseline.size_bytes
    findings = []
    if config.max_share is not None:
        allowed = int(_decimal(config.max_share) * other)
        text = (
            f"{candidate.name} has {own:,} bytes, {100 * own / other:.2f} % of {baseline.name}'s {other:,}, "
            f"allowed {_percent(config.max_share)} % ({allowed:,} bytes)"
        )
        findings.append(Check(own / other <= config.max_share, text))
    if config.max_bytes is not None:
        text = f"{candidate.name} has {own:,} bytes, allowed {config.max_bytes:,}"
        findings.append(Check(own <= config.max_bytes, text))
    figures: dict[str, JSON] = {
        "size_bytes": own,
        "baseline_size_bytes": other,
        "share": own / other,
        "max_share": config.max_share,
        "max_bytes": config.max_bytes,
    }
    return _verdict(findings, candidate, baseline, figures)


def judge_latency(config: LatencyConfig, comparison: Comparison) -> Verdict:
    """Hold the candidate's median latency in one cell against the baseline's and against a ceiling."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    own, other = (row.latency(config.batch_size, config.threads) for row in (candidate, baseline))
    if own is None:
        return _undecided(config, candidate)
    if other is None and config.max_share is not None:
        return _undecided(config, baseline)
    where = cell_label(config.batch_size, config.threads)
    takes = f"{candidate.name} takes {own.median_ms:.4g} ms at {where} (median of {own.num_runs} runs)"
    findings = []
    if config.max_share is not None and other is not None:
        share = own.median_ms / other.median_ms
        text = (
            f"{takes}, {100 * share:.1f} % of {baseline.name}'s {other.median_ms:.4g} ms, "
            f"allowed {_percent(config.max_share)} % ({config.max_share * other.median_ms:.4g} ms)"
        )
        findings.append(Check(share <= config.max_share, text))
    if config.max_ms is not None:
        findings.append(Check(own.median_ms <= config.max_ms, f"{takes}, allowed {config.max_ms:.4g} ms"))
    return _verdict(findings, candidate, baseline, _latency_figures(config, own, other))


def _latency_figures(config: LatencyConfig, own: Latency, other: Latency | None) -> dict[str, JSON]:
    return {
        "batch_size": config.batch_size,
        "threads": config.threads,
        "median_ms": own.median_ms,
        "baseline_median_ms": None if other is None else other.median_ms,
        "max_ms": config.max_ms,
        "max_share": config.max_share,
    }


def _undecided(config: LatencyConfig, row: Row) -> Verdict:
    there = "; ".join(cell.label for cell in row.latencies) or "no latency at all"
    where = cell_label(config.batch_size, config.threads)
    return Verdict(
        Decision.UNDECIDED,
        f"{row.name} was not timed at {where}; the comparison has: {there}",
        {"candidate": config.candidate, "batch_size": config.batch_size, "threads": config.threads},
        config.fail_undecided,
    )


def _verdict(findings: Sequence[Check], candidate: Row, baseline: Row, figures: dict[str, JSON]) -> Verdict:
    kept = all(finding.kept for finding in findings)
    told = findings if kept else [finding for finding in findings if not finding.kept]
    reason = "; ".join(finding.text for finding in told)
    facts: dict[str, JSON] = {"candidate": candidate.name, "baseline": baseline.name}
    return Verdict(Decision.PASSED if kept else Decision.REFUSED, reason, facts | figures)


def _decimal(limit: float) -> Decimal:
    return Decimal(repr(limit))  # the shortest decimal that reads back as this float: what the user wrote


def _percent(share: float, min_decimals: int = 0) -> str:
    """A limit in percent with all its digits: 0.003 is `0.30`."""
    percent = (_decimal(share) * 100).normalize()
    exponent = percent.as_tuple().exponent
    assert isinstance(exponent, int), f"{share} is not a number"
    return f"{percent:.{max(min_decimals, -exponent)}f}"


def _points(count: int, total: int) -> str:
    """A share in percent, with digits enough to tell one sample more from one less."""
    return f"{100 * count / total:.{max(2, len(str(total - 1)) - 2)}f}"
