"""Warn of gates whose margin can't be shown with the samples that there are. Numpy and scipy are for the text alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeAlias

from ptpipe import JSON
from ptpipe_eval.config import AccuracyConfig, DropTest, QualityConfig, SelectConfig, TimingOptions

if TYPE_CHECKING:
    from ptpipe import Plan, PlannedStage, Problem

Summaries: TypeAlias = Mapping[str, Mapping[str, Mapping[str, JSON]]]
"""Of stored outputs, by stage and output."""

_ACCURACY = "accuracy"
_DISCORDANCE = 0.01
"""The example of a message: a quantized model usually differs from its float one on 0.1 to 2 % of the samples."""


def smallest_margin(num_samples: int, confidence: float) -> float:
    """Return the margin that a gate can show where no sample is lost or gained.

    Tango's limit is then that of Wilson: z**2 / (N + z**2).
    """
    square = NormalDist().inv_cdf(confidence) ** 2
    return square / (num_samples + square)


def zero_margin_warnings(plan: Plan) -> Iterator[Problem]:
    """Warn of gates that no number of samples lets a model pass that is as good as the baseline."""
    for gate in plan.stages:
        if isinstance(gate.config, DropTest) and gate.config.max_drop == 0:
            message = "max_drop 0 passes only a model that is better beyond chance: allow a small drop"
            yield plan.problem(gate.id, message, "max_drop", severity="warning")


def margin_warnings(plan: Plan, summaries: Summaries) -> Iterator[Problem]:
    """Warn of gates that can only be undecided or refuse, where the number of samples is known from stored results."""
    for gate in plan.stages:
        config = gate.config
        if not isinstance(config, DropTest) or not config.max_drop or "comparison" not in gate.wiring:
            continue
        num_samples = _num_samples(plan, gate, summaries)
        if num_samples and smallest_margin(num_samples, config.confidence) >= config.max_drop:
            yield plan.problem(gate.id, _message(config, config.max_drop, num_samples), "max_drop", severity="warning")


def _message(config: DropTest, max_drop: float, num_samples: int) -> str:
    from ptpipe_torch.quality.proportions import num_samples_needed, smallest_margin_of

    smallest = smallest_margin(num_samples, config.confidence)
    typical = smallest_margin_of(num_samples, _DISCORDANCE, config.confidence)
    needed = [num_samples_needed(max_drop, 0.0, of, config.confidence) or 0 for of in (0.0, _DISCORDANCE)]
    return (
        f"max_drop {max_drop:g} is less than {num_samples:,} samples can show at {100 * config.confidence:g} % "
        f"confidence: {_shown(smallest)} where no sample is lost or gained, about {_shown(typical)} where "
        f"{100 * _DISCORDANCE:g} % are; it takes {needed[0]:,} samples, or {needed[1]:,}"
    )


def _shown(margin: float) -> str:
    """Format a margin with two digits that count, rounded up: the number that is shown does pass."""
    digits = 1 - math.floor(math.log10(margin))
    return f"{math.ceil(margin * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def _num_samples(plan: Plan, gate: PlannedStage, summaries: Summaries) -> int | None:
    """Return the number of samples that a gate judges a fraction of, if a stored result tells it."""
    reference = gate.wiring["comparison"][0]
    source = plan[reference.stage]
    if not isinstance(source.config, TimingOptions):  # a comparison of another plugin
        return None
    if table := summaries.get(source.id, {}).get(reference.output):
        return int(str(table["num_samples"])) if _has_counts(gate.config, table) else None
    data = source.wiring["data"][0]
    found = summaries.get(data.stage, {}).get(data.output, {})
    if not _is_accuracy(gate.config, found.get("task")):
        return None
    number = found.get(f"num_{source.config.split}")
    return number if isinstance(number, int) else None


def _has_counts(config: object, table: Mapping[str, Any]) -> bool:
    """Return whether a comparison has lost and gained samples for the metric that a gate judges."""
    primary = table["metrics"][0]["name"] if table["metrics"] else None
    name = (config.metric or primary) if isinstance(config, QualityConfig | SelectConfig) else _ACCURACY
    return any("num_lost" in row.get("paired", {}).get(name, {}) for row in table["rows"])


def _is_accuracy(config: object, task: JSON) -> bool:
    """Return whether a gate judges the accuracy of a data set with this task."""
    if isinstance(config, QualityConfig | SelectConfig):
        return (config.metric or (task == "Classification" and _ACCURACY)) == _ACCURACY
    return isinstance(config, AccuracyConfig)
