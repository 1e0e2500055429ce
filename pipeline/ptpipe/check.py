"""Results of `ptpipe doctor`: one line each about the installation or the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class CheckState(StrEnum):
    """The severity of a result."""

    OK = "ok"
    WARN = "warn"
    """Works, but not as well as it could."""
    FAIL = "fail"
    """Does not work; `ptpipe doctor` ends with exit code 1."""


@dataclass(frozen=True)
class Check:
    """One result: create it with `Check.ok`, `Check.warn` or `Check.fail`."""

    subject: str
    state: CheckState
    detail: str
    remedy: str = ""
    """What the user can do."""

    @classmethod
    def ok(cls, subject: str, detail: str) -> Check:
        """Report that `subject` works; `detail` is its version or figure."""
        return cls(subject, CheckState.OK, detail)

    @classmethod
    def warn(cls, subject: str, detail: str, remedy: str = "") -> Check:
        """Report that `subject` works, but not as well as it could; `remedy`: what would help."""
        return cls(subject, CheckState.WARN, detail, remedy)

    @classmethod
    def fail(cls, subject: str, detail: str, remedy: str) -> Check:
        """Report that `subject` does not work; `remedy`: what the user can do."""
        return cls(subject, CheckState.FAIL, detail, remedy)


def installed(distribution: str, least: str, below: str = "") -> Check:
    """Find whether a distribution is installed in a version from `least` on, before `below`."""
    from importlib.metadata import PackageNotFoundError, version

    wanted = f"{distribution}>={least}" + (f",<{below}" if below else "")
    remedy = f"pip install '{wanted}'"
    try:
        return in_range(distribution, version(distribution), least, below, remedy)
    except PackageNotFoundError:
        return Check.fail(distribution, "is not installed", remedy)


def in_range(subject: str, version: str, least: str, below: str, remedy: str) -> Check:
    """Find whether a version is one from `least` on, before `below` (empty: no end)."""
    number = _numbers(version)
    if number < _numbers(least):
        return Check.fail(subject, f"{version} is too old: {least} is the first that works", remedy)
    if below and number >= _numbers(below):
        return Check.fail(subject, f"{version} is too new: ptpipe knows those before {below}", remedy)
    return Check.ok(subject, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0+cpu` is (2, 13)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:  # 2.13 and 2.13.0 are one version
        numbers.pop()
    return tuple(numbers)
