"""What a sweep varies: `--over finetune.lr=1e-3,1e-2` as an axis with its values, or a range to draw from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ptpipe import JSON, ManifestError, Plan, Problem, nearest
from ptpipe.commands import read_settings

SEED = "seed"
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
_WHOLE = re.compile(r"[-+]?\d+")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    is_log: bool = False
    """Whether equal ratios are equally likely, not equal differences."""
    is_whole: bool = False
    """Whether it has whole numbers only."""

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{':log' if self.is_log else ''}"


@dataclass(frozen=True)
class Axis:
    """One option, or one that several stages have, and the values that it takes."""

    name: str
    """As on the command line: `finetune.lr`, or `backend` for every stage that has such an option."""
    options: tuple[str, ...]
    """What it overrides: `("finetune.lr",)`, `("dynamic.backend", "observed.backend")`."""
    values: tuple[JSON, ...] | Range


def parse_axes(texts: Sequence[str], plan: Plan) -> tuple[Axis, ...]:
    """Return the axes that the `--over` options describe. Raises ManifestError with every problem."""
    axes: list[Axis] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            axes.append(_axis(text, plan))
        except ManifestError as error:
            problems += error.problems
    problems += _named_twice(axes, plan)
    if problems:
        raise ManifestError(problems)
    return tuple(axes)


def _axis(text: str, plan: Plan) -> Axis:
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise _error(text, "not of the form STAGE.OPTION=VALUE,VALUE")
    options = _options(text, name, plan)
    if match := _RANGE.fullmatch(values.strip()):
        return Axis(name, options, _range(text, match))
    return Axis(name, options, _values(text, name, values))


def _options(text: str, name: str, plan: Plan) -> tuple[str, ...]:
    """Return the names of the options that an axis overrides, as after `-s`."""
    stages = {stage.id: stage.stage.config_type.model_fields for stage in plan.stages}
    first, dot, _ = name.partition(".")
    if name == SEED or (dot and first in stages):
        return (name,)
    if first in stages:
        raise _error(text, f"name one of its options: {first}.OPTION=VALUE,VALUE")
    having = tuple(f"{stage_id}.{name}" for stage_id, options in stages.items() if first in options)
    if having:
        return having
    if dot:
        raise _error(text, f"there is no stage {first!r}, and no stage has an option {first!r}", nearest(first, stages))
    known = dict.fromkeys(option for options in stages.values() for option in options)
    raise _error(text, f"no stage has an option {first!r}", nearest(first, known))


def _range(text: str, match: re.Match[str]) -> Range:
    is_whole = all(_WHOLE.fullmatch(bound) for bound in match.groups()[:2])
    found = Range(float(match[1]), float(match[2]), match[3] is not None, is_whole)
    if not found.low < found.high:
        raise _error(text, "a range begins with the smaller number")
    if found.is_log and found.low <= 0:
        raise _error(text, "a logarithmic range begins above 0")
    return found


def _values(text: str, name: str, values: str) -> tuple[JSON, ...]:
    try:
        read = read_settings([f"{name}=[{values}]"])[name]
    except ManifestError as error:
        raise _error(text, error.problems[0].message.partition("]: ")[2] or "not a list of values") from error
    found = tuple(read) if isinstance(read, list) else ()
    texts = [json.dumps(value, sort_keys=True) for value in found]
    if len(found) < 2:
        raise _error(text, "give several values, separated by commas, or a range such as 1e-4..1e-2:log; `-s` sets one")
    if twice := next((value for value in texts if texts.count(value) > 1), None):
        raise _error(text, f"{twice} is named twice")
    return found


def _named_twice(axes: Iterable[Axis], plan: Plan) -> Iterable[Problem]:
    """Yield a problem for each option that is set twice, itself or as part of another."""
    seen: dict[str, str] = dict.fromkeys(plan.manifest.overrides, "-s")
    for axis in axes:
        for option in axis.options:
            overlapping = (of for of in seen if f"{of}.".startswith(f"{option}.") or f"{option}.".startswith(f"{of}."))
            if other := next(overlapping, None):
                overlap = "" if option == other else f" with {other}"
                yield Problem(f"--over {axis.name}: {option} is set by {seen[other]} too{overlap}")
            seen.setdefault(option, f"--over {axis.name}")


def _error(text: str, message: str, suggestion: str | None = None) -> ManifestError:
    return ManifestError([Problem(f"--over {text}: {message}", suggestion=suggestion)])


def overrides_of(axes: Iterable[Axis], settings: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return what a trial overrides, by option, from its values by axis."""
    return {option: settings[axis.name] for axis in axes for option in axis.options}
