"""What `quant.tune` adds to a run's report."""

from __future__ import annotations

from ptpipe import Section
from ptpipe.sections import Dot, DotPlot, DotSeries, Mark, Table, Text, Topic
from ptpipe_quant.tuning.trials import Trial, Trials


def section(stage_id: str, trials: Trials) -> Section:
    """Return the trials as a table and a plot."""
    factor = 100 if trials.is_fraction else 1
    unit = f"points of {trials.metric} lost" if trials.is_fraction else f"{trials.metric} worse by"
    best = trials.best
    names = tuple(f"trial {number}" for number in range(1, len(trials.trials) + 1))
    rows = tuple(_row(name, trial, factor) for name, trial in zip(names, trials.trials, strict=True))
    columns = (
        "trial",
        "remedies",
        "kept float",
        unit,
        "low",
        "high",
        "samples",
        "budget",
        "int8 parameters %",
    )
    dots = tuple(Dot(*(factor * value for value in (of.drop, of.drop_low, of.drop_high))) for of in trials.trials)
    plot = DotPlot(
        "Trials", unit, names, (DotSeries("drop", dots),), (Mark("max_drop", "x", factor * trials.max_drop),)
    )
    text = Text(
        f"The model of trial {trials.trials.index(best) + 1} was returned: {_decision(best)}. A trial ends as soon as "
        f"its samples of {trials.split} decide."
    )
    return Section(f"Tuning: {stage_id}", (text, Table(columns, rows), plot), Topic.QUANTIZATION, stage_id)


def _row(name: str, trial: Trial, factor: float) -> tuple[str | int | float, ...]:
    choice = trial.choice
    return (
        name,
        ", ".join(f"{layer}: {remedy}" for layer, remedy in choice.layers) or "nothing",
        ", ".join(choice.skip) or "nothing",
        round(factor * trial.drop, 4),
        round(factor * trial.drop_low, 4),
        round(factor * trial.drop_high, 4),
        trial.num_samples,
        _decision(trial),
        round(100 * trial.int8_fraction, 2),
    )


def _decision(trial: Trial) -> str:
    decision = "met" if trial.is_met else "missed"
    return decision if trial.is_sure else f"{decision} on these samples, not sure"
