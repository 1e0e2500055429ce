"""Judge size and latency in a comparison: the work of these gates. Imports neither torch nor numpy.

A value equal to its limit passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptpipe import JSON, Decision, Verdict
from ptpipe_eval.comparison import Comparison, Latency, Row, cell_label
from ptpipe_eval.verdicts import LimitCheck
from ptpipe_eval.verdicts import decimal as _decimal
from ptpipe_eval.verdicts import percent as _percent
from ptpipe_eval.verdicts import verdict as _verdict

if TYPE_CHECKING:
    from ptpipe_eval.config import LatencyConfig, SizeConfig


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


def judge_latency(config: LatencyConfig, comparison: Comparison) -> Verdict:
    """Compare the candidate's median latency in one cell with the baseline's and with a maximum."""
    candidate, baseline = comparison.row(config.candidate), comparison.row(comparison.baseline)
    own, other = (row.latency(config.batch_size, config.threads) for row in (candidate, baseline))
    if own is None:
        return _undecided(config, candidate)
    if other is None and config.max_ratio is not None:
        return _undecided(config, baseline)
    where = cell_label(config.batch_size, config.threads)
    takes = f"{candidate.name} takes {own.median_ms:.4g} ms at {where} (median of {own.num_runs} runs)"
    checks = []
    if config.max_ratio is not None and other is not None:
        ratio = own.median_ms / other.median_ms
        text = (
            f"{takes}, {100 * ratio:.1f} % of {baseline.name}'s {other.median_ms:.4g} ms, "
            f"allowed {_percent(config.max_ratio)} % ({config.max_ratio * other.median_ms:.4g} ms)"
        )
        checks.append(LimitCheck(ratio <= config.max_ratio, text))
    if config.max_ms is not None:
        checks.append(LimitCheck(own.median_ms <= config.max_ms, f"{takes}, allowed {config.max_ms:.4g} ms"))
    return _verdict(checks, candidate, baseline, _latency_figures(config, own, other))


def _latency_figures(config: LatencyConfig, own: Latency, other: Latency | None) -> dict[str, JSON]:
    return {
        "batch_size": config.batch_size,
        "threads": config.threads,
        "median_ms": own.median_ms,
        "baseline_median_ms": None if other is None else other.median_ms,
        "max_ms": config.max_ms,
        "max_ratio": config.max_ratio,
    }


def _undecided(config: LatencyConfig, row: Row) -> Verdict:
    available = "; ".join(cell.label for cell in row.latencies) or "no latency"
    where = cell_label(config.batch_size, config.threads)
    return Verdict(
        Decision.UNDECIDED,
        f"{row.name} was not measured at {where}; the comparison has: {available}",
        {"candidate": config.candidate, "batch_size": config.batch_size, "threads": config.threads},
        config.fail_undecided,
    )
