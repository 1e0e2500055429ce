"""The task of data sets of one class for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptpipe import StageError, nearest
from ptpipe_torch import Classification
from ptpipe_torch.task.ranking import MAX_RANKED

if TYPE_CHECKING:
    from ptpipe import Context
    from ptpipe_data.config import ClassesConfig

_MAX_NAMED = 10


def classification(
    class_names: Sequence[str], options: ClassesConfig, train_labels_N: npt.NDArray[np.int64]
) -> Classification:
    """Return the task. Raises StageError for a positive class that is none, or a metric of other classes."""
    names, positive = tuple(class_names), options.positive
    if positive is not None and positive not in names:
        close = nearest(positive, names)
        hint = f"did you mean {close!r}?" if close else f"there are {', '.join(names[:20])}"
        raise StageError(f"classes.positive: {positive!r} is no class ({hint})")
    counts_K = np.bincount(train_labels_N, minlength=len(names)) if options.weights == "balanced" else None
    return Classification(
        class_names=names,
        class_weights=() if counts_K is None else balanced_weights(counts_K),
        focal_gamma=options.focal_gamma,
        positive_class=positive,
        **_metric_of(names, options),
    )


def _metric_of(names: Sequence[str], options: ClassesConfig) -> dict[str, Any]:
    """Return what the task has of `classes.metric`. Raises StageError where no mean over these classes makes sense."""
    metric = options.metric
    if options.positive is not None or metric == "f1":
        return {"positive_metric": metric}
    if len(names) <= 2:
        raise StageError(f"classes.metric: of two classes, {metric} is of the one to find: name it as `positive`")
    if len(names) > MAX_RANKED:
        raise StageError(f"classes.metric: {metric} is of at most {MAX_RANKED} classes, and there are {len(names):,}")
    return {"ovr_metric": metric}


def refuse_single_class(where: object, class_names: Sequence[str]) -> None:
    """Raise StageError where there is one class: a network that always predicts it would be right."""
    if len(class_names) == 1:
        raise StageError(f"{where} has samples of one class, {class_names[0]}: a classification needs two")


def report_absent(counts_K: npt.NDArray[np.int64], class_names: Sequence[str], ctx: Context) -> None:
    """Give a notice that names the classes of which train has nothing."""
    absent = [name for name, count in zip(class_names, counts_K.tolist(), strict=True) if not count]
    if absent:
        more = ", ..." if len(absent) > _MAX_NAMED else ""
        named = ", ".join(absent[:_MAX_NAMED])
        ctx.notice(f"train has nothing of {len(absent):,} of {len(class_names):,} classes: {named}{more}")


def balanced_weights(counts_K: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """Return weights in inverse proportion to the counts, whose mean over all that is counted is 1; 0 for a count of 0.

    scikit-learn's `class_weight="balanced"` (King and Zeng, 2001), of the classes that occur.
    """
    num_classes = np.count_nonzero(counts_K)
    weights_K = counts_K.sum() / (num_classes * np.maximum(counts_K, 1))
    return tuple(np.where(counts_K > 0, weights_K, 0.0).tolist())
