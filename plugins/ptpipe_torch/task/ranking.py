"""Area under the ROC curve and average precision: they depend on the order of all samples, so no sums give them.

Importing this imports neither torch nor numpy.
Shape legend: N samples, L labels, R draws, T groups of samples, in the order of a label's scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ptpipe import JSON
from ptpipe_torch.task.task import Metric, Task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

ROC_AUC = Metric("roc_auc", higher_is_better=True, is_fraction=True)
"""The probability that a sample with the label has a higher score than one without it; equal ones count half."""
AVERAGE_PRECISION = Metric("average_precision", higher_is_better=True, is_fraction=True)
"""The mean over samples with the label of the precision among all samples with a score at least as high."""
RANKING_NAMES = (ROC_AUC.name, AVERAGE_PRECISION.name)
RANKED = "ranked"
"""The name of `Task.label_scores` beside `Task.sample_sums`."""
_BLOCK_DRAWS = 8
"""That are computed at a time: a line of the processor's cache for each sample."""


def with_ranking(task: Task, figures: Mapping[str, JSON], rows_NL2: npt.NDArray[np.float32] | None) -> dict[str, JSON]:
    """Return the figures, and the task's metrics that are computed from `rows_NL2`: `Task.label_scores` of all samples.

    None: there are none.
    """
    import numpy as np

    if rows_NL2 is None:
        return dict(figures)
    values = Ranking(rows_NL2).values(np.ones((1, len(rows_NL2))))
    return {
        **figures,
        **{metric.name: float(values[metric.name][0]) for metric in task.metrics if metric.name in values},
    }


def rows_of_samples(
    task: Task, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> dict[str, npt.NDArray[Any]]:
    """Return of each sample what all metrics are computed from: `Task.sample_sums`, and `RANKED` where there is one."""
    rows = {name: of.numpy() for name, of in task.sample_sums(outputs, targets).items()}
    ranked = task.label_scores(outputs, targets)
    return rows if ranked is None else rows | {RANKED: ranked.numpy()}


def added(rows: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the rows without `RANKED`: those whose sums are a metric's."""
    return {name: of for name, of in rows.items() if name != RANKED}


class Ranking:
    """Samples in the order of their scores.

    `rows_NL2`: `Task.label_scores` of all of them.
    """

    def __init__(self, rows_NL2: npt.NDArray[np.float32]) -> None:
        self._labels = [_Label(rows_N2[:, 0], rows_N2[:, 1] > 0) for rows_N2 in rows_NL2.swapaxes(0, 1)]

    def values(self, counts_RN: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """Return both metrics of draws, (R,). `counts_RN`: how often each draw has each sample.

        Means over the labels that have a value: for the area, those that some samples have and others don't; for the
        precision, those that some have. 0 where no label has one, NaN where a score is NaN.
        """
        import numpy as np

        size = _BLOCK_DRAWS
        blocks = (counts_RN[start : start + size].T for start in range(0, len(counts_RN), size))
        parts = [self._values(np.ascontiguousarray(block_NR)) for block_NR in blocks]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def placements(self) -> npt.NDArray[np.int64]:
        """Return of each sample and label how many samples of the other kind are on its wrong side, twice; (N, L).

        With equal scores, half of them are. Those of DeLong, DeLong and Clarke-Pearson, Biometrics 44 (1988), times
        twice the number of the others: the area is 1 minus their mean over samples of either kind.
        """
        import numpy as np

        return np.stack([label.placements() for label in self._labels], axis=1)

    @property
    def supports(self) -> npt.NDArray[np.int64]:
        """How many samples have each label and how many don't, (L, 2)."""
        import numpy as np

        return np.array([(label.has_N.sum(), (~label.has_N).sum()) for label in self._labels])

    def _values(self, counts_NR: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        import numpy as np

        area_R, precision_R, num_areas_R, num_precisions_R = np.zeros((4, counts_NR.shape[1]))
        for label in self._labels:
            found_TR, others_TR = label.groups(counts_NR)
            found_so_far_TR, others_so_far_TR = found_TR.cumsum(axis=0), others_TR.cumsum(axis=0)
            found_R, others_R = found_so_far_TR[-1], others_so_far_TR[-1]
            above_TR = found_so_far_TR - found_TR / 2  # with equal scores, half of them
            area_R += label.scale * (others_TR * above_TR).sum(axis=0) / np.maximum(1, found_R * others_R)
            precision_TR = found_so_far_TR / np.maximum(1, found_so_far_TR + others_so_far_TR)
            precision_R += label.scale * (found_TR * precision_TR).sum(axis=0) / np.maximum(1, found_R)
            num_areas_R += found_R * others_R > 0
            num_precisions_R += found_R > 0
        return {
            ROC_AUC.name: area_R / np.maximum(1, num_areas_R),
            AVERAGE_PRECISION.name: precision_R / np.maximum(1, num_precisions_R),
        }


class _Label:
    """Samples in the order of the scores of one label, the highest first.

    `scores_N`, `has_N`: the score of each sample, and whether it has the label.
    """

    def __init__(self, scores_N: npt.NDArray[np.float32], has_N: npt.NDArray[np.bool_]) -> None:
        import numpy as np
        from scipy import sparse

        order_N = np.argsort(-scores_N, kind="stable")
        sorted_N = scores_N[order_N]
        starts_T = np.flatnonzero(np.concatenate([[True], sorted_N[1:] != sorted_N[:-1]]))
        # Following samples without the label may be taken together: between them, no metric changes.
        has_some_T = np.logical_or.reduceat(has_N[order_N], starts_T)
        starts_T = starts_T[np.concatenate([[True], has_some_T[1:] | has_some_T[:-1]])]
        self.has_N = has_N
        self.group_N = np.empty(len(order_N), dtype=np.int64)
        """The group of each sample: those of one score, or several without the label."""
        self.group_N[order_N] = np.arange(len(starts_T)).repeat(np.diff(starts_T, append=len(order_N)))
        rows_N = np.where(has_N, 0, len(starts_T)) + self.group_N
        cells = np.ones(len(rows_N)), (rows_N, np.arange(len(rows_N)))
        self._sums = sparse.csr_array(cells, shape=(2 * len(starts_T), len(rows_N)))
        self.scale = float("nan") if np.isnan(scores_N).any() else 1.0

    def groups(self, counts_NR: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return how many samples of each group have the label and how many don't, both (T, R)."""
        counts_TR = self._sums @ counts_NR
        return counts_TR[: len(counts_TR) // 2], counts_TR[len(counts_TR) // 2 :]

    def placements(self) -> npt.NDArray[np.int64]:
        """Return the column of `Ranking.placements`."""
        import numpy as np

        found_T, others_T = (of_TR[:, 0] for of_TR in self.groups(np.ones((len(self.group_N), 1))))
        others_above_T = 2 * others_T.cumsum() - others_T
        found_below_T = 2 * (found_T.sum() - found_T.cumsum()) + found_T
        wrong_N = np.where(self.has_N, others_above_T[self.group_N], found_below_T[self.group_N])
        return wrong_N.astype(np.int64)
