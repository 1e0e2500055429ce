"""Judge a latency: the work of gate.latency. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptpipe import JSON, Decision, Verdict
from ptpipe_eval.latency.latencies import Latency, cell_label

if TYPE_CHECKING:
    from ptpipe_eval.comparison import Comparison, Row
    from ptpipe_eval.config import LatencyConfig

_ORDER = (Decision.REFUSED, Decision.UNDECIDED, Decision.PASSED)


def judge_latency(config: LatencyConfig, comparison: Comparison) -> Verdict:
    """Judge by the intervals of ratio and median: refused and passed are certain to 95 %, else it is undecided."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    own = candidate.latency(config.batch_size, config.threads)
    if own is None:
        return _not_measured(config, candidate)
    facts: dict[str, JSON] = {
        "candidate": candidate.name,
        "baseline": baseline.name,
        "batch_size": config.batch_size,
        "threads": config.threads,
        "median_ms": own.median_ms,
        "ratio": own.ratio,
        "ratio_low": own.ratio_low,
        "ratio_high": own.ratio_high,
        "max_ms": config.max_ms,
        "max_ratio": config.max_ratio,
    }
    checks = list(_checks(config, own, candidate.name, baseline.name))
    decision = min((decision for decision, _ in checks), key=_ORDER.index)
    reasons = "; ".join(reason for found, reason in checks if found is decision)
    where = cell_label(config.batch_size, config.threads)
    return Verdict(decision, f"{where}: {reasons}", facts, config.fail_undecided)


def _checks(config: LatencyConfig, own: Latency, candidate: str, baseline: str) -> list[tuple[Decision, str]]:
    checks = []
    if config.max_ratio is not None:
        decision = _decision(own.ratio_low, own.ratio_high, config.max_ratio)
        text = f"{candidate} takes {_ratio_text(own)} the time of {baseline}, allowed {config.max_ratio:g}x"
        checks.append((decision, text + _remedy(decision, own)))
    if config.max_ms is not None:
        decision = _decision(own.low_ms, own.high_ms, config.max_ms)
        text = f"{candidate} takes {_median_text(own)}, allowed {config.max_ms:g} ms"
        checks.append((decision, text + _remedy(decision, own)))
    return checks


def _decision(low: float | None, high: float | None, limit: float) -> Decision:
    if low is None or high is None or low <= limit < high:
        return Decision.UNDECIDED
    return Decision.PASSED if high <= limit else Decision.REFUSED


def _remedy(decision: Decision, own: Latency) -> str:
    if decision is not Decision.UNDECIDED:
        return ""
    if own.ratio_high is None:
        return "; the machine was too busy to tell, measure again (--fresh)"
    return "; the limit is inside the interval, a longer budget_s of the comparison narrows it"


def _ratio_text(own: Latency) -> str:
    interval = "" if own.ratio_low is None else f" ({own.ratio_low:.3g} to {own.ratio_high:.3g})"
    return f"{own.ratio:.3g}x{interval}"


def _median_text(own: Latency) -> str:
    interval = "" if own.low_ms is None else f" ({own.low_ms:.4g} to {own.high_ms:.4g})"
    return f"{own.median_ms:.4g} ms{interval}"


def _not_measured(config: LatencyConfig, row: Row) -> Verdict:
    available = "; ".join(cell.label for cell in row.latencies) or "no latency"
    where = cell_label(config.batch_size, config.threads)
    return Verdict(
        Decision.UNDECIDED,
        f"{row.name} was not measured at {where}; the comparison has: {available}",
        {"candidate": config.candidate, "batch_size": config.batch_size, "threads": config.threads},
        config.fail_undecided,
    )
