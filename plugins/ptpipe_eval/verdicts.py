"""What the gates have in common: limits that are met or not, and how they are written. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from ptpipe import JSON, Decision, ExitCode, Verdict
from ptpipe_eval.comparison import Comparison, Row

if TYPE_CHECKING:
    from ptpipe_eval.config import GateConfig


@dataclass(frozen=True)
class LimitCheck:
    """One value compared with its limit."""

    is_met: bool | None
    """None: undecided."""
    reason: str


def verdict(
    checks: Sequence[LimitCheck],
    candidate: Row,
    baseline: Row,
    figures: Mapping[str, JSON],
    fail_undecided: bool = False,
) -> Verdict:
    """Return a verdict on several limits, whose reason names those that are not met, else the undecided ones."""
    violated, undecided = ([check for check in checks if check.is_met is state] for state in (False, None))
    decision = Decision.REFUSED if violated else Decision.UNDECIDED if undecided else Decision.PASSED
    reason = "; ".join(check.reason for check in violated or undecided or checks)
    facts: dict[str, JSON] = {"candidate": candidate.name, "baseline": baseline.name, **figures}
    return Verdict(decision, reason, facts, fail_undecided)


def judge_all(config: GateConfig, comparison: Comparison, judge: Callable[[Row], Verdict]) -> Verdict:
    """Return the verdict on the only candidate, or on several that must all pass.

    Each is judged as if it were alone: that all of several pass by chance is less likely than that one does, so this
    needs no correction for their number (Berger, "Multiparameter hypothesis testing and acceptance sampling",
    Technometrics 24, 1982).
    """
    verdicts = {name: judge(comparison.row(name)) for name in config.names}
    if config.candidate is not None:
        return verdicts[config.candidate]
    by_decision = {
        decision: [verdict for verdict in verdicts.values() if verdict.decision is decision]
        for decision in (Decision.REFUSED, Decision.UNDECIDED, Decision.PASSED)
    }
    decision, deciding = next((decision, found) for decision, found in by_decision.items() if found)
    count = f"{len(deciding)} of {len(verdicts)} candidates {decision}"
    return Verdict(
        decision,
        f"{count}: {'; '.join(verdict.reason for verdict in deciding)}",
        {"baseline": comparison.baseline, "candidates": rows_of(verdicts.values())},
        any(verdict.fail_undecided for verdict in by_decision[Decision.UNDECIDED]),
    )


def rows_of(verdicts: Iterable[Verdict]) -> list[JSON]:
    """Return a row for each candidate: what was decided of it, why, and from what."""
    return [{**verdict.facts, "decision": str(verdict.decision), "reason": verdict.reason} for verdict in verdicts]


def exit_code(verdict: Verdict) -> ExitCode:
    """Return the exit code of a command that judges: as a run's with this verdict."""
    if verdict.decision is Decision.REFUSED:
        return ExitCode.REFUSED
    return ExitCode.UNDECIDED if verdict.decision is Decision.UNDECIDED and verdict.fail_undecided else ExitCode.DONE


def decimal(limit: float) -> Decimal:
    """Return the shortest decimal that parses to this float: what the user wrote."""
    return Decimal(repr(limit))


def percent(fraction: float, min_decimals: int = 0) -> str:
    """Format a limit in percent with all its digits: 0.003 is `0.30`."""
    value = (decimal(fraction) * 100).normalize()
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), f"{fraction} is not a number"
    return f"{value:.{max(min_decimals, -exponent)}f}"
