"""Results of `ptpipe doctor`: one line each about the installation or the machine."""

from __future__ import annotations

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
        """Report that `subject` works, but not as well as it could; `detail`: why, `remedy`: what would help."""
        return cls(subject, CheckState.WARN, detail, remedy)

    @classmethod
    def fail(cls, subject: str, detail: str, remedy: str) -> Check:
        """Report that `subject` does not work; `detail`: why, `remedy`: what the user can do."""
        return cls(subject, CheckState.FAIL, detail, remedy)


def installed(distribution: str, bounds_of: str = "") -> Check:
    """Check that `distribution` is installed, in a version that ptpipe's own requirements allow.

    `bounds_of`: the requirement to take the bounds from where it has another name (`onnxruntime-gpu` is an
    `onnxruntime`). A distribution that ptpipe does not require passes in any version.
    """
    from importlib.metadata import PackageNotFoundError, version

    bounds = _requirements().get(_normalized(bounds_of or distribution), "")
    remedy = f"pip install '{distribution}{bounds}'"
    try:
        return in_range(distribution, version(distribution), bounds, remedy)
    except PackageNotFoundError:
        return Check.fail(distribution, "is not installed", remedy)


def supported_python() -> str:
    """Return the versions of Python that ptpipe supports, as its metadata has them: `>=3.11,<3.14`."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return metadata("ptpipe")["Requires-Python"]
    except PackageNotFoundError:  # on the path, but not installed
        return ""


def in_range(subject: str, version: str, bounds: str, remedy: str) -> Check:
    """Check a version against bounds such as `>=2.11,<2.14`; a pre-release or local build counts as its release."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version).base_version
    except InvalidVersion:
        return Check.fail(subject, f"{version} is not a version number", remedy)
    for bound in sorted(SpecifierSet(bounds), key=str):
        if not bound.contains(release):
            fault = "old" if bound.operator in (">", ">=", "~=") else "new"
            return Check.fail(subject, f"{version} is too {fault}: ptpipe requires {bound}", remedy)
    return Check.ok(subject, version)


def _requirements() -> dict[str, str]:
    """Return the version bounds of ptpipe's dependencies by normalized name: `{"torch": "<2.14,>=2.11"}`."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        parsed = map(Requirement, requires("ptpipe") or ())
        return {
            _normalized(requirement.name): str(requirement.specifier)
            for requirement in parsed
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        }
    except PackageNotFoundError:  # on the path, but not installed
        return {}


def _normalized(name: str) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)
