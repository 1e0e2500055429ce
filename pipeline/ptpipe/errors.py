"""Exit codes, located problems and the exception tree."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What a ptpipe process says to the shell."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNDECIDED = 4
    INTEGRITY = 5
    PLUGIN = 6
    BUG = 70
    INTERRUPTED = 130
    TERMINATED = 143


@dataclass(frozen=True, order=True)
class Location:
    """A place in a text file; lines and columns count from 1."""

    path: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One mistake of the user's, in one line, with its place and the nearest right word."""

    message: str
    location: Location | None = None
    suggestion: str | None = None
    code: ExitCode = ExitCode.USAGE

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        hint = f" (did you mean {self.suggestion!r}?)" if self.suggestion else ""
        return f"{place}{self.message}{hint}"


class PtpipeError(Exception):
    """Base of every error that ptpipe raises on purpose; its text is one line for a person."""

    exit_code = ExitCode.FAILED


class ManifestError(PtpipeError, ValueError):
    """A manifest, an override or a plugin that it names is wrong; carries every problem found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        assert self.problems, "a ManifestError without problems"
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @property
    def exit_code(self) -> ExitCode:  # type: ignore[override]  # decided by what went wrong
        return max((problem.code for problem in self.problems), key=_gravity)


class UsageError(PtpipeError, ValueError):
    """The command line (or a call of the Python API) names something that isn't there or can't be used."""

    exit_code = ExitCode.USAGE


class StageError(PtpipeError, ValueError):
    """A stage could not do its work, for a reason that the user can act on."""


class IntegrityError(PtpipeError):
    """Stored bytes are not those that were written."""

    exit_code = ExitCode.INTEGRITY


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, not an `Exception`: no stage may swallow it."""


def _gravity(code: ExitCode) -> bool:
    # A broken plugin causes unknown kinds: it is the one to be named by the exit code.
    return code is ExitCode.PLUGIN


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The known word closest to a mistyped one, or None when nothing is close."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return matches[0] if matches else None
