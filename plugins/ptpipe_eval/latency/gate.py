"""Judge a latency: the work of gate.latency. Imports neither torch nor numpy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ptpipe import JSON, Decision, Verdict
from ptpipe_eval.latency.latencies import Latency, cell_label
from ptpipe_eval.verdicts import LimitCheck, judge_all, verdict

if TYPE_CHECKING:
    from ptpipe_eval.comparison import Comparison, Row
    from ptpipe_eval.config import LatencyConfig


def judge_latency(config: LatencyConfig, comparison: Comparison, source: str) -> Verdict:
    """Judge by the intervals of ratio and median: refused and passed are certain to 95 %, else it is undecided.

    A median without an interval passes where its bound is within the limit. `source`: the comparison's stage.
    """
    return judge_all(config, comparison, partial(_judge_latency, config, comparison, source))


def _judge_latency(config: LatencyConfig, comparison: Comparison, source: str, candidate: Row) -> Verdict:
    baseline = comparison.row(comparison.baseline)
    own = candidate.latency(config.batch_size, config.threads, config.length)
    if own is None:
        return _not_measured(config, candidate)
    where, checks = own.label, []
    check = partial(_check, source)
    if config.max_ratio is not None:
        text = f"{where}: {candidate.name} takes {_ratio_text(own)} the time of {baseline.name}"
        checks.append(check(own.ratio_low, own.ratio_high, config.max_ratio, f"{text}, allowed {config.max_ratio:g}x"))
    if config.max_ms is not None:
        text = f"{where}: {candidate.name} takes {_median_text(own)}"
        if own.bound_ms is not None and own.bound_ms <= config.max_ms:
            text = f"{where}: {candidate.name} takes at most {own.bound_ms:.4g} ms, on a machine that was busy"
            checks.append(LimitCheck(True, f"{text}, allowed {config.max_ms:g} ms"))
        else:
            checks.append(check(own.low_ms, own.high_ms, config.max_ms, f"{text}, allowed {config.max_ms:g} ms"))
    figures: dict[str, JSON] = {
        "batch_size": config.batch_size,
        "threads": config.threads,
        "median_ms": own.median_ms,
        "bound_ms": own.bound_ms,
        "ratio": own.ratio,
        "ratio_low": own.ratio_low,
        "ratio_high": own.ratio_high,
        "max_ms": config.max_ms,
        "max_ratio": config.max_ratio,
    }
    if config.length is not None:
        figures["length"] = config.length
    return verdict(checks, candidate, baseline, figures, _fails(config, own))


def _fails(config: LatencyConfig, own: Latency) -> bool:
    """Return whether an undecided gate ends the run."""
    if config.on_inconclusive == "estimate":
        pairs = ((own.ratio, config.max_ratio), (own.median_ms, config.max_ms))
        return any(limit is not None and value > limit for value, limit in pairs)
    return config.on_inconclusive == "fail"


def _check(source: str, low: float | None, high: float | None, limit: float, text: str) -> LimitCheck:
    if low is None or high is None:
        return LimitCheck(None, f"{text}; the machine was too busy to tell, measure again (--fresh {source})")
    if low <= limit < high:
        remedy = "the limit is inside the interval, a longer budget_s of the comparison narrows it"
        return LimitCheck(None, f"{text}; {remedy}")
    return LimitCheck(high <= limit, text)


def _ratio_text(own: Latency) -> str:
    interval = "" if own.ratio_low is None else f" ({own.ratio_low:.3g} to {own.ratio_high:.3g})"
    return f"{own.ratio:.3g}x{interval}"


def _median_text(own: Latency) -> str:
    interval = "" if own.low_ms is None else f" ({own.low_ms:.4g} to {own.high_ms:.4g})"
    return f"{own.median_ms:.4g} ms{interval}"


def _not_measured(config: LatencyConfig, row: Row) -> Verdict:
    available = "; ".join(cell.label for cell in row.latencies) or "no latency"
    where = cell_label(config.batch_size, config.threads, config.length)
    return Verdict(
        Decision.UNDECIDED,
        f"{row.name} was not measured at {where}; the comparison has: {available}",
        {"candidate": row.name, "batch_size": config.batch_size, "threads": config.threads},
        config.on_inconclusive != "warn",  # what was not measured has no estimate within the limit
    )
