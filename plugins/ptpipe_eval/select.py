"""Choose the best of several models among those that are no worse than the baseline: the work of select.best.

Imports neither torch nor numpy. A choice among several is made in view of the very samples that each was tested on, and
several tests err more often than one does: Holm's correction keeps at 5 % (at a confidence of 95 %) the probability
that any model passes whose drop is `max_drop` or more, so the one that is chosen errs no more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ptpipe import JSON, Decision, Verdict
from ptpipe_eval.quality.gates import check_drop, drop_facts
from ptpipe_eval.quality.holm import holm
from ptpipe_eval.verdicts import rows_of

if TYPE_CHECKING:
    from ptpipe_eval.comparison import Comparison, Row
    from ptpipe_eval.config import SelectConfig
    from ptpipe_torch import Metric

_BEST = {"size": "the smallest", "latency": "the fastest", "quality": "the best"}
_FIRST = "the first"
_BY_OTHER = (_BEST["size"], _BEST["quality"], _FIRST)
_MET = {True: Decision.PASSED, False: Decision.REFUSED, None: Decision.UNDECIDED}


def choose(config: SelectConfig, comparison: Comparison, names: Sequence[str]) -> tuple[str | None, Verdict]:
    """Return the name of the best model that may be chosen, None where none may, and the verdict on all of them.

    `names`: the candidates, rows of the comparison. The baseline among them is no worse than itself: it is chosen
    where no other passes, or where it is better.
    """
    metric = comparison.metric(config.metric)
    verdicts = _judged(config, comparison, metric, names)
    passing = [name for name, verdict in verdicts.items() if verdict.decision is Decision.PASSED]
    possible = passing or _undecided(config, comparison, metric, verdicts)
    chosen, why = _best(config, comparison, metric, possible)
    facts: dict[str, JSON] = {
        "selected": chosen,
        "by": config.by,
        "baseline": comparison.baseline,
        "metric": metric.name,
        "max_drop": config.max_drop,
        "confidence": config.confidence,
        "candidates": rows_of(verdicts.values()),
    }
    if chosen is not None:
        decision, passes = (Decision.PASSED, "pass") if passing else (Decision.UNDECIDED, "may pass")
        group = f"{len(possible)} of {len(names)} candidates that {passes}" if len(names) > 1 else "1 candidate"
        why += " (latency does not decide)" if config.by == "latency" and why in _BY_OTHER else ""
        return chosen, Verdict(decision, f"{chosen} is {why} of {group}: {verdicts[chosen].reason}", facts)
    undecided = [verdict.reason for verdict in verdicts.values() if verdict.decision is Decision.UNDECIDED]
    reasons = undecided or [verdict.reason for verdict in verdicts.values()]
    decision = Decision.UNDECIDED if undecided else Decision.REFUSED
    reason = f"none of {len(names)} candidates is selected: {'; '.join(reasons)}"
    return None, Verdict(decision, reason, facts, fail_undecided=bool(undecided))


def _judged(config: SelectConfig, comparison: Comparison, metric: Metric, names: Sequence[str]) -> dict[str, Verdict]:
    """Return a verdict on each candidate, with p-values that are corrected for their number."""
    tested = [name for name in names if name != comparison.baseline]
    drops = [comparison.drop(name, metric) for name in tested]
    p_values = [1.0 if drop is None else drop.p_value(config.max_drop) for drop in drops]
    pairs = dict(zip(tested, zip(p_values, holm(p_values), strict=True), strict=True))
    return {
        name: _judged_alone(config, comparison, metric, comparison.row(name), *pairs.get(name, (None, None)))
        for name in names
    }


def _judged_alone(
    config: SelectConfig, comparison: Comparison, metric: Metric, row: Row, p_value: float | None, holm_p: float | None
) -> Verdict:
    baseline = comparison.row(comparison.baseline)
    facts: dict[str, JSON] = {
        "candidate": row.name,
        "value": row.metrics[metric.name],
        metric.drop_name: metric.drop(row.metrics[metric.name], baseline.metrics[metric.name]),
        **drop_facts(comparison.drop(row.name, metric), config.max_drop, config.confidence),
        "p_value": p_value,
        "p_value_holm": holm_p,
        "size_bytes": row.size_bytes,
        "latency_ms": cell.median_ms
        if (cell := row.latency(config.batch_size, config.threads, config.length))
        else None,
    }
    if p_value is None or holm_p is None:
        return Verdict(Decision.PASSED, f"{row.name} is the baseline", facts)
    check = check_drop(comparison, row, metric, config.max_drop, config.confidence)
    if check.is_met and holm_p >= 1 - config.confidence:
        reason = f"{check.reason}; as one of several candidates that is not enough: p = {holm_p:.2g} by Holm's method"
        return Verdict(Decision.UNDECIDED, reason, facts)
    return Verdict(_MET[check.is_met], check.reason, facts)


def _undecided(
    config: SelectConfig, comparison: Comparison, metric: Metric, verdicts: Mapping[str, Verdict]
) -> list[str]:
    """Return the candidates that may be chosen although it is not shown that they pass: see `on_inconclusive`."""
    names = [name for name, verdict in verdicts.items() if verdict.decision is Decision.UNDECIDED]
    if config.on_inconclusive == "estimate":
        return [name for name in names if _drop(comparison, metric, name) <= config.max_drop]
    return names if config.on_inconclusive == "warn" else []


def _best(config: SelectConfig, comparison: Comparison, metric: Metric, names: Sequence[str]) -> tuple[str | None, str]:
    """Return the best by `by`, then by size, latency and quality, then the first in the manifest; and why it is."""
    why = "the only one"
    for criterion in dict.fromkeys((config.by, *_BEST)):
        if len(names) <= 1:
            break
        why = _BEST[criterion]
        if criterion == "latency":
            names = _fastest(config, comparison, names)
        elif criterion == "size":
            smallest = min(comparison.row(name).size_bytes for name in names)
            names = [name for name in names if comparison.row(name).size_bytes == smallest]
        else:
            least = min(_drop(comparison, metric, name) for name in names)
            names = [name for name in names if _drop(comparison, metric, name) == least]
    return next(iter(names), None), why if len(names) <= 1 else _FIRST


def _fastest(config: SelectConfig, comparison: Comparison, names: Sequence[str]) -> Sequence[str]:
    """Return the models that are not shown to be slower than the fastest: whose intervals reach its own.

    All of them where a latency is not known.
    """
    cells = {name: comparison.row(name).latency(config.batch_size, config.threads, config.length) for name in names}
    intervals = {
        name: (cell.ratio, cell.ratio_low, cell.ratio_high)
        for name, cell in cells.items()
        if cell is not None and cell.ratio_low is not None and cell.ratio_high is not None
    }
    if len(intervals) < len(names):
        return names
    _, _, fastest_high = min(intervals.values())
    return [name for name, (_, low, _) in intervals.items() if low <= fastest_high]


def _drop(comparison: Comparison, metric: Metric, name: str) -> float:
    baseline = comparison.row(comparison.baseline)
    return metric.drop(comparison.row(name).metrics[metric.name], baseline.metrics[metric.name])
