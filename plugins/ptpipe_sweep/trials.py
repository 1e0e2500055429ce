"""The trials of a sweep: every combination of the values, or combinations drawn at random; all are checked first."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ptpipe import JSON, ManifestError, Plan, Problem, UsageError, load_plan
from ptpipe_sweep.space import Axis, Range, overrides_of

MAX_TRIALS = 1000
_DIGITS = 4
"""Significant digits of numbers drawn from a range: enough to search with, and short enough to read."""


@dataclass(frozen=True)
class Trial:
    """One combination of values, bound to the manifest."""

    number: int
    """Counts from 1."""
    settings: Mapping[str, JSON]
    """The value by axis."""
    plan: Plan

    @property
    def overrides(self) -> Mapping[str, JSON]:
        """All overrides of the manifest, those of `-s` too."""
        return self.plan.manifest.overrides

    def __str__(self) -> str:
        return " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())


def shown(value: JSON) -> str:
    """Return a value as it is written in a manifest: `fbgemm`, `0.001`, `1e+08`, `[1, 32]`."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def grid(axes: Sequence[Axis]) -> list[dict[str, JSON]]:
    """Return every combination of the axes' values, the last axis varying fastest. Raises UsageError for a range."""
    listed: list[tuple[JSON, ...]] = []
    for axis in axes:
        if isinstance(axis.values, Range):
            raise UsageError(f"--over {axis.name}={axis.values}: a range has no grid: add --random N or --optuna N")
        listed.append(axis.values)
    if (size := math.prod(map(len, listed))) > MAX_TRIALS:
        raise UsageError(f"a grid of {size:,} trials is too large: --random N tries some of them")
    return [dict(zip((axis.name for axis in axes), values, strict=True)) for values in itertools.product(*listed)]


def drawn(axes: Sequence[Axis], num: int, seed: int) -> list[dict[str, JSON]]:
    """Return `num` different combinations drawn at random; all of them where there are no more."""
    listed = [axis.values for axis in axes if not isinstance(axis.values, Range)]
    if len(listed) == len(axes) and math.prod(map(len, listed)) <= min(num, MAX_TRIALS):
        return grid(axes)
    stream = random.Random(seed)  # noqa: S311  # no secret
    found: dict[str, dict[str, JSON]] = {}
    for _ in range(100 * num):  # a range of whole numbers may have fewer
        settings = {axis.name: _draw(axis.values, stream) for axis in axes}
        found.setdefault(json.dumps(settings), settings)
        if len(found) == num:
            break
    return list(found.values())


def _draw(values: Sequence[JSON] | Range, stream: random.Random) -> JSON:
    if not isinstance(values, Range):
        return stream.choice(values)
    if values.is_log:
        value = math.exp(stream.uniform(math.log(values.low), math.log(values.high)))
    elif values.is_whole:
        return stream.randint(int(values.low), int(values.high))
    else:
        value = stream.uniform(values.low, values.high)
    return rounded(value, values)


def extremes(axes: Sequence[Axis]) -> list[dict[str, JSON]]:
    """Return combinations that have every value of every axis, of a range both ends: what a search may choose."""
    ends = {axis.name: _ends(axis.values) for axis in axes}
    longest = max(map(len, ends.values()))
    return [{name: values[place % len(values)] for name, values in ends.items()} for place in range(longest)]


def _ends(values: Sequence[JSON] | Range) -> Sequence[JSON]:
    return [rounded(end, values) for end in (values.low, values.high)] if isinstance(values, Range) else values


def rounded(value: float, values: Range) -> JSON:
    """Round a number drawn from a range to four significant digits, or to a whole number; never out of the range."""
    near = round(value) if values.is_whole else float(f"{value:.{_DIGITS}g}")
    inside = min(max(near, values.low), values.high)
    return int(inside) if values.is_whole else float(inside)


def bind(plan: Plan, axes: Sequence[Axis], settings: Sequence[Mapping[str, JSON]], first: int = 1) -> list[Trial]:
    """Bind every trial, numbered from `first`. Raises ManifestError with the problems of all trials, each once."""
    trials: list[Trial] = []
    failed: dict[str, list[tuple[Problem, str]]] = {}
    for number, values in enumerate(settings, first):
        try:
            trials.append(Trial(number, values, load_plan(plan, overrides_of(axes, values))))
        except ManifestError as error:
            text = str(Trial(number, values, plan))
            for problem in error.problems:
                failed.setdefault(str(problem), []).append((problem, text))
    if failed:
        raise ManifestError(_problems(failed, len(settings)))
    return trials


def _problems(failed: Mapping[str, Sequence[tuple[Problem, str]]], num_trials: int) -> Iterator[Problem]:
    for found in failed.values():
        problem, text = found[0]
        message = problem.message
        if message.startswith("-s "):  # the option that the user gave is --over
            message = f"--over {message.removeprefix('-s ')}"
        if len(found) < num_trials:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            message += f" (in the trial {text}{more})"
        yield Problem(message, problem.location, problem.suggestion, problem.code)
