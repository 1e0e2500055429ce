"""Trainings that learned nothing: val's labels alone say as much as the network does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from ptpipe import JSON
from ptpipe_torch import Classification, Data, Regression
from ptpipe_torch.task.own_functions import OwnFunctionsTask

_MIN_SAMPLES = 50
"""Of val: among fewer, a network that learned something may by chance be right no more often."""
_CAUSES = "the lr may be too high or too low, or the epochs too few"


def no_better_than_trivial(data: Data, metrics: Mapping[str, JSON]) -> str | None:
    """Return what answer that looks at no input is as good on val; None where none is, or it isn't known.

    `metrics`: of the delivered model.
    """
    val, task = data.splits["val"], data.info.task
    if isinstance(task, OwnFunctionsTask) and task.metric is None:
        task = task.task
    if len(val) < _MIN_SAMPLES:
        return None
    match task, task.metrics[0].name:
        # With weights for the classes, fewer right answers may be what is wanted.
        case Classification(class_weights=()), "accuracy":
            accuracy = cast("float", metrics["val_accuracy"])
            share = np.bincount(val.targets["labels"].values()).max() / len(val)
            if accuracy <= share:
                return (
                    f"val accuracy {accuracy:.2%} is no better than always answering the most frequent class, "
                    f"{share:.2%}: {_CAUSES}"
                )
        case Regression(), "r2":
            r2 = cast("float", metrics["val_r2"])
            if r2 <= 0:
                return f"val r2 {r2:.3g} is no better than always answering the mean, 0: {_CAUSES}"
    return None
