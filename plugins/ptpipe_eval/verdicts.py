"""What the gates have in common: limits that are met or not, and how they are written. Imports no numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ptpipe import JSON, Decision, Verdict
from ptpipe_eval.comparison import Row


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


def decimal(limit: float) -> Decimal:
    """Return the shortest decimal that parses to this float: what the user wrote."""
    return Decimal(repr(limit))


def percent(fraction: float, min_decimals: int = 0) -> str:
    """Format a limit in percent with all its digits: 0.003 is `0.30`."""
    value = (decimal(fraction) * 100).normalize()
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), f"{fraction} is not a number"
    return f"{value:.{max(min_decimals, -exponent)}f}"
