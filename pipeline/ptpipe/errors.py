"""Exit codes, problems with their location, and the exception hierarchy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of a ptpipe process."""

    DONE = 0
    FAILED = 1
    """A stage failed, or the artifacts folder can't be used."""
    USAGE = 2
    """The manifest or the command line is wrong."""
    REFUSED = 3
    """A gate refused."""
    UNDECIDED = 4
    """A gate could not decide, and is configured to fail then."""
    INTEGRITY = 5
    """A stored artifact is corrupt."""
    PLUGIN = 6
    """A plugin is missing or broken."""
    BUG = 70
    """A bug in ptpipe."""
    INTERRUPTED = 130
    """SIGINT (Ctrl-C)."""
    TERMINATED = 143
    """SIGTERM."""


@dataclass(frozen=True, order=True)
class Location:
    """A position in a text file; lines and columns count from 1."""

    path: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One mistake of the user, reported in one line: `file:line:column: message (did you mean 'x'?)`."""

    message: str
    """What is wrong; begins with the stage id, where there is one (`Plan.problem` does that)."""
    location: Location | None = None
    suggestion: str | None = None
    """The valid word nearest to a mistyped one: see `nearest`."""
    code: ExitCode = ExitCode.USAGE

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        hint = f" (did you mean {self.suggestion!r}?)" if self.suggestion else ""
        return f"{place}{self.message}{hint}"


class PtpipeError(Exception):
    """Base of all errors that ptpipe raises deliberately; the text is one line for the user."""

    exit_code = ExitCode.FAILED


class ManifestError(PtpipeError, ValueError):
    """A manifest, an override or a plugin that it names is wrong; `problems` has every problem found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        assert self.problems, "a ManifestError without problems"
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @property
    def exit_code(self) -> ExitCode:  # type: ignore[override]  # depends on the problems
        return max((problem.code for problem in self.problems), key=_gravity)


class UsageError(PtpipeError, ValueError):
    """The command line, or a call of the Python API, names something that does not exist or can't be used."""

    exit_code = ExitCode.USAGE


class StageError(PtpipeError, ValueError):
    """A stage failed for a reason that the user can act on; the text says what to do."""


class IntegrityError(PtpipeError):
    """Stored bytes differ from those that were written."""

    exit_code = ExitCode.INTEGRITY


class Terminated(BaseException):
    """SIGTERM was received. Like KeyboardInterrupt it is no `Exception`, so that no stage swallows it."""


def _gravity(code: ExitCode) -> bool:
    # A broken plugin also causes unknown kinds: the exit code names the cause.
    return code is ExitCode.PLUGIN


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the word of `words` that is closest to a mistyped one, or None if none is close."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return matches[0] if matches else None
