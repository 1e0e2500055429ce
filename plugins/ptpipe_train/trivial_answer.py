"""Trainings that learned nothing: val's targets alone say as much as the network does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ptpipe import JSON
from ptpipe_torch import Data
from ptpipe_torch.task.task import MIN_TRIVIAL_SAMPLES


def no_better_than_trivial(data: Data, metrics: Mapping[str, JSON]) -> str | None:
    """Return which answer that looks at no input is as good on val, and the likely cause.

    None where no such answer is, or it isn't known. `metrics`: of the delivered model.
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
    cause = task.cause_of_errors(figures) or "the lr may be too high or too low, or the epochs too few"
    return f"val {metric.name} {shown} is no better than always answering {answer}, {bound}: {cause}"
