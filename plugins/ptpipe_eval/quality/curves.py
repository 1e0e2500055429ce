"""ROC and precision-recall curves of a model, as few points that reports draw: no sample is needed for them again.

Shape legend: N samples, P points.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import JSON
from ptpipe_torch import Task

CURVES = "curves"
"""The name of the table among a task's figures."""
_MAX_POINTS = 100
"""Of a curve, and of all curves of a model, 4,000: 60 kB."""
_MAX_TOTAL_POINTS = 4000
_MAX_LABELS = 100
_EXACT = 1e-4
"""Nearer to the line than that, no point is drawn: a twentieth of a pixel."""

Points = npt.NDArray[np.float64]


def curves_of(
    task: Task, figures: Mapping[str, JSON], rows_NL2: npt.NDArray[np.float32] | None
) -> dict[str, list[JSON]]:
    """Return the curves of each label that some samples have and others don't, as the table `CURVES`; or nothing.

    `rows_NL2`: `Task.label_scores` of all samples, `figures`: the task's. A curve's points are (x, y): (false positive
    rate, recall), and (recall, precision), between whose points precision is that of the next one, as in the average
    precision. `operating_point`: where the predictions are that the other metrics are of.
    """
    names = task.score_names
    if rows_NL2 is None or not 0 < len(names) <= _MAX_LABELS or rows_NL2.shape[1] != len(names):
        return {}
    max_points = min(_MAX_POINTS, _MAX_TOTAL_POINTS // (2 * len(names)))
    found: list[JSON] = []
    for number, name in enumerate(names):
        scores_N, has_N = rows_NL2[:, number, 0], rows_NL2[:, number, 1] > 0
        if np.isnan(scores_N).any() or has_N.all() or not has_N.any():
            continue
        roc, precision_recall = _corners(scores_N, has_N)
        found.append(
            {
                "name": name,
                "fraction": float(has_N.mean()),
                "roc_auc": _area(roc),
                "average_precision": _area(precision_recall),
                "roc": _rounded(thinned(roc, max_points)),
                "precision_recall": _rounded(thinned(precision_recall, max_points)),
                "operating_point": _operating_point(figures, name, len(has_N)),
            }
        )
    return {CURVES: found} if found else {}


def _corners(scores_N: npt.NDArray[np.float32], has_N: npt.NDArray[np.bool_]) -> tuple[Points, Points]:
    """Return where the ROC curve and the precision-recall curve turn, (P, 2): under them is exactly either metric."""
    order_N = np.argsort(-scores_N, kind="stable")
    sorted_N = scores_N[order_N]
    last_P = np.flatnonzero(np.append(sorted_N[1:] != sorted_N[:-1], True))  # of samples with equal scores
    right_P = np.cumsum(has_N[order_N])[last_P]
    found_P = last_P + 1
    recall_P, precision_P = right_P / has_N.sum(), right_P / found_P
    roc = np.stack([(found_P - right_P) / (~has_N).sum(), recall_P], axis=1)
    grows_P = np.diff(right_P, prepend=0) > 0
    ends, precisions = recall_P[grows_P], precision_P[grows_P]
    starts = np.append(0.0, ends[:-1])
    steps = np.stack([np.stack([starts, ends], axis=1).ravel(), precisions.repeat(2)], axis=1)
    return np.concatenate([[[0.0, 0.0]], roc]), steps


def _area(points: Points) -> float:
    """Return the area under a curve."""
    widths, sums = np.diff(points[:, 0]), points[1:, 1] + points[:-1, 1]
    return float(widths @ sums) / 2


def thinned(points: Points, max_points: int) -> Points:
    """Return at most that many of a curve's points: again and again, the one that is farthest from the line so far.

    Ramer (1972), Douglas and Peucker (1973), with a number of points in place of a distance.
    """
    kept = [0, len(points) - 1]
    distances = [_farthest(points, 0, len(points) - 1)]
    while len(kept) < max_points and max(distances)[0] > _EXACT:
        place = distances.index(max(distances))
        middle = distances[place][1]
        parts = (kept[place], middle), (middle, kept[place + 1])
        kept.insert(place + 1, middle)
        distances[place : place + 1] = [_farthest(points, *part) for part in parts]
    return points[kept]


def _farthest(points: Points, first: int, last: int) -> tuple[float, int]:
    """Return the distance, and the place, of the point between two that is farthest from the line between them."""
    if last - first < 2:
        return 0.0, first
    offsets = points[first + 1 : last] - points[first]
    along = points[last] - points[first]
    length = float(np.hypot(*along))
    across = offsets[:, 0] * along[1] - offsets[:, 1] * along[0]
    distances = np.abs(across) / length if length else np.hypot(offsets[:, 0], offsets[:, 1])
    return float(distances.max()), first + 1 + int(distances.argmax())


def _rounded(points: Points) -> list[JSON]:
    return [[round(x, 5), round(y, 5)] for x, y in points.tolist()]


def _operating_point(figures: Mapping[str, JSON], name: str, num_samples: int) -> dict[str, JSON] | None:
    """Return rates of the predictions of a label, from the task's table of classes or labels; None: it has none."""
    rows: Any = figures.get("per_label", figures.get("per_class", ()))
    row = next((of for of in rows if isinstance(of, Mapping) and of.get("name") == name), {})
    if not {"support", "predicted", "recall", "precision"} <= row.keys() or not row["support"]:
        return None
    num_wrong = row["predicted"] - round(row["recall"] * row["support"])
    rate = num_wrong / max(1, num_samples - row["support"])
    return {"recall": row["recall"], "precision": row["precision"], "false_positive_rate": rate}
