"""Signs and colours of the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ptpipe import Decision, Outcome

STYLES: Mapping[str, str] = {
    Outcome.DONE: "green",
    Outcome.CACHED: "cyan",
    Outcome.REFUSED: "bold magenta",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "dim",
    Decision.PASSED: "green",
    Decision.UNDECIDED: "yellow",
}
"""By outcome, and by a gate's decision (`refused` is both)."""
NOTICE = "bold yellow"
FAINT = "dim"
ACCENT = "cyan"


@dataclass(frozen=True)
class Look:
    """The signs that an encoding can write."""

    outcomes: Mapping[str, str]
    notice: str
    separator: str
    bar_done: str
    bar_left: str
    spinner: str

    def sign(self, outcome: str) -> str:
        """One character for an outcome or a decision."""
        return self.outcomes.get(outcome, self.notice)


UNICODE = Look(
    outcomes={"done": "✓", "cached": "✓", "passed": "✓", "refused": "✗", "failed": "✗", "skipped": "-"},
    notice="▲",
    separator=" · ",
    bar_done="━",
    bar_left="─",
    spinner="⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏",
)
ASCII = Look(
    outcomes={"done": "+", "cached": "=", "passed": "+", "refused": "x", "failed": "x", "skipped": "-"},
    notice="!",
    separator=", ",
    bar_done="#",
    bar_left="-",
    spinner="|/-\\",
)
