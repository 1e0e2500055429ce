"""Exit codes, problems with their location, and the exception hierarchy."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any, Literal, TypeAlias

from ptpipe.printable import one_line

MAX_PROBLEMS = 100
"""How many problems of a manifest are reported; of the others only the number, and no suggestion is sought."""
_MAX_LENGTH = 1000
_MAX_WORDS, _MAX_LETTERS = 500, 100


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
    HUNG_UP = 129
    """SIGHUP: the terminal was closed, or the connection to it lost."""
    INTERRUPTED = 130
    """SIGINT (Ctrl-C)."""
    TERMINATED = 143
    """SIGTERM."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the process."""
        return self in (ExitCode.HUNG_UP, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


Severity: TypeAlias = Literal["error", "warning", "note"]
"""A warning or a note stops nothing and changes no exit code; a note is about what could not be checked."""


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
    """One mistake of the user, reported in one line: `file:line:column: message (did you mean 'x'?)`.

    A warning is written as compilers do: `file:line:column: warning: message`.
    """

    message: str
    """What is wrong; begins with the stage id, where there is one (`Plan.problem` does that)."""
    location: Location | None = None
    suggestion: str | None = None
    """The valid word nearest to a mistyped one: see `nearest`."""
    code: ExitCode = ExitCode.USAGE
    severity: Severity = "error"

    def __post_init__(self) -> None:
        if len(self.message) > _MAX_LENGTH:  # it quotes a text of any length
            shown = f"{self.message[: _MAX_LENGTH // 2]} ... {self.message[-_MAX_LENGTH // 3 :]}"
            object.__setattr__(self, "message", shown)

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        place += "warning: " if self.severity == "warning" else ""
        hint = f" (did you mean {self.suggestion!r}?)" if self.suggestion else ""
        return one_line(f"{place}{self.message}{hint}")


def first_problems(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the first 100 problems; if there are more, with one that says how many."""
    num_more = len(problems) - MAX_PROBLEMS
    if num_more <= 1:
        return tuple(problems)
    return (*problems[:MAX_PROBLEMS], Problem(f"... and {num_more:,} more problems"))


class PtpipeError(Exception):
    """Base of all errors that ptpipe raises deliberately; the text is one line for the user."""

    exit_code = ExitCode.FAILED

    def __reduce__(self) -> tuple[Any, ...]:
        # By its content: `__init__` of a subclass may take other arguments than the text.
        # As its built-in base gives that: an OSError's file is not among its `args`.
        return _restored, (type(self), super().__reduce__()[1], self.__dict__)


def _restored(type_: type[PtpipeError], arguments: tuple[object, ...], attributes: dict[str, object]) -> PtpipeError:
    """Return a pickled error."""
    base: Any = next(each for each in type_.__mro__ if each.__module__ == "builtins")
    error: PtpipeError = base.__new__(type_, *arguments)
    base.__init__(error, *arguments)
    error.__dict__.update(attributes)
    return error


class ManifestError(PtpipeError, ValueError):
    """A manifest, an override or a plugin that it names is wrong.

    `problems` has every problem found; after the 100th, one that says how many more there are.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = tuple(problems)
        assert found, "a ManifestError without problems"
        self.exit_code = max((problem.code for problem in found), key=_gravity)
        self.problems = first_problems(found)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UsageError(PtpipeError, ValueError):
    """The command line, or a call of the Python API, names something that does not exist or can't be used."""

    exit_code = ExitCode.USAGE


class StageError(PtpipeError, ValueError):
    """A stage failed for a reason that the user can act on; the text says what to do."""

    frames: tuple[str, ...] = ()
    """Lines of code that it came through in another process; a launcher sets them (`ptpipe.launching.error_frames`)."""


class IntegrityError(PtpipeError):
    """Stored bytes differ from those that were written."""

    exit_code = ExitCode.INTEGRITY


class Terminated(BaseException):
    """SIGTERM or SIGHUP was received. Like KeyboardInterrupt it is no `Exception`, so that no stage swallows it.

    `exit_code`: that of the process, by which the signals differ.
    """

    def __init__(self, exit_code: ExitCode = ExitCode.TERMINATED) -> None:
        super().__init__()
        self.exit_code = exit_code


def _gravity(code: ExitCode) -> bool:
    # A broken plugin also causes unknown kinds: the exit code names the cause.
    return code is ExitCode.PLUGIN


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the word of `words` that is closest to `word`, which was mistyped, case aside; or None if none is close.

    Only the first 500 words are compared, and only with a word of at most 100 letters: a list of thousands is no
    vocabulary, and comparing takes its time.
    """
    if len(word) > _MAX_LETTERS:
        return None
    known = [other for other in islice(words, _MAX_WORDS) if len(other) <= _MAX_LETTERS]
    if same := next((other for other in known if other.casefold() == word.casefold()), None):
        return same
    matcher = difflib.SequenceMatcher(b=word)

    def upper_bound(other: str) -> float:
        matcher.set_seq1(other)
        return matcher.quick_ratio()

    likely = heapq.nlargest(10, known, key=upper_bound)
    matches = difflib.get_close_matches(word, likely, n=1, cutoff=0.6)
    return matches[0] if matches else None
