"""Symbols and styles of the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ptpipe import Decision, Outcome

STYLES: Mapping[str, str] = {
    Outcome.DONE: "green",
    Outcome.CACHED: "cyan",
    Outcome.REFUSED: "bold magenta",
    Outcome.FAILED: "bold red",
    Outcome.INTERRUPTED: "bold yellow",
    Outcome.SKIPPED: "dim",
    Decision.PASSED: "green",
    Decision.UNDECIDED: "yellow",
}
"""By outcome, and by a gate's decision (`refused` and `undecided` are both)."""
NOTICE = "bold yellow"
FAINT = "dim"
ACCENT = "cyan"
BAR_REMAINDER = "bright_black"


@dataclass(frozen=True)
class Theme:
    """The symbols that an encoding can write."""

    outcomes: Mapping[str, str]
    notice: str
    separator: str
    spinner: str

    def symbol(self, outcome: str) -> str:
        """Return one character for an outcome or a decision."""
        return self.outcomes.get(outcome, self.notice)


UNICODE = Theme(
    outcomes={
        "done": "✓",
        "cached": "✓",
        "passed": "✓",
        "refused": "✗",
        "failed": "✗",
        "interrupted": "✗",
        "skipped": "-",
    },
    notice="▲",
    separator=" · ",
    spinner="⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏",
)
ASCII = Theme(
    outcomes={
        "done": "+",
        "cached": "=",
        "passed": "+",
        "refused": "x",
        "failed": "x",
        "interrupted": "x",
        "skipped": "-",
    },
    notice="!",
    separator=", ",
    spinner="|/-\\",
)
