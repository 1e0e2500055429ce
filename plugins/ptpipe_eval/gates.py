"""Judge sizes in a comparison: the work of gate.size. Imports neither torch nor numpy.

A value equal to its limit passes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ptpipe import JSON, Verdict
from ptpipe_eval.comparison import Comparison, Row
from ptpipe_eval.verdicts import LimitCheck, decimal, judge_all, percent, verdict

if TYPE_CHECKING:
    from ptpipe_eval.config import SizeConfig


def judge_size(config: SizeConfig, comparison: Comparison) -> Verdict:
    """Compare sizes with the baseline's and with a maximum."""
    return judge_all(config, comparison, partial(_judge_size, config, comparison))


def _judge_size(config: SizeConfig, comparison: Comparison, candidate: Row) -> Verdict:
    baseline = comparison.row(comparison.baseline)
    own, other = candidate.size_bytes, baseline.size_bytes
    checks = []
    if config.max_ratio is not None:
        allowed = int(decimal(config.max_ratio) * other)
        text = (
            f"{candidate.name} has {own:,} bytes, {100 * own / other:.2f} % of {baseline.name}'s {other:,}, "
            f"allowed {percent(config.max_ratio)} % ({allowed:,} bytes)"
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
    return verdict(checks, candidate, baseline, figures)
