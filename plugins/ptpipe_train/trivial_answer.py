"""Trainings that learned nothing: val's targets alone say as much as the network does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ptpipe import JSON
from ptpipe_torch import Data
from ptpipe_torch.task.task import MIN_TRIVIAL_SAMPLES

_FALLEN = 0.9
"""Of the first epoch's loss: less is more than chance."""


def no_better_than_trivial(data: Data, metrics: Mapping[str, JSON], first: Mapping[str, JSON]) -> str | None:
    """Return which answer that looks at no input is as good on val, and the likely cause.

    None where no such answer is, or it isn't known. `metrics`: of the delivered model; `first`: of the first epoch's.
    """
    val, task = data.splits["val"], data.info.task
    if len(val) < MIN_TRIVIAL_SAMPLES or (trivial := task.trivial_answer(val.targets)) is None:
        return None
    answer, reached = trivial
    metric = task.primary_metric
    value = cast("float", metrics[f"val_{metric.name}"])
    if metric.drop(value, reached) < 0:
        return None
    shown, bound = (f"{number:.2%}" if metric.is_fraction else f"{number:.3g}" for number in (value, reached))
    figures = {name.removeprefix("val_"): value for name, value in metrics.items() if name.startswith("val_")}
    cause = task.cause_of_errors(figures) or _memorized(metrics, first)
    cause = cause or "the lr may be too high or too low, or the epochs too few"
    return f"val {metric.name} {shown} is no better than always answering {answer}, {bound}: {cause}"


def _memorized(metrics: Mapping[str, JSON], first: Mapping[str, JSON]) -> str | None:
    """Return that losses of train and val have parted; None where they haven't."""
    names = ("train_loss", "val_loss")
    if not all(isinstance(of.get(name), float) for of in (metrics, first) for name in names):
        return None
    (train, val), (first_train, first_val) = (
        tuple(cast("float", of[name]) for name in names) for of in (metrics, first)
    )
    if not 0 < train < _FALLEN * first_train or val <= first_val:
        return None
    return (
        f"train loss fell from {first_train:.3g} to {train:.3g} and val loss rose from {first_val:.3g} to {val:.3g}: "
        "it learned train by heart, or val differs from train; more or augmented samples may help, or a smaller network"
    )
