"""Area under the ROC curve and average precision: they depend on the order of all samples, so no sums give them.

Importing this imports neither torch nor numpy.
Shape legend: N samples, L labels, R draws, T groups of samples, in the order of a label's scores, S by C of them.
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
ROC_AUC_OVR = Metric("roc_auc_ovr", higher_is_better=True, is_fraction=True)
"""The mean of `ROC_AUC` over classes, each one against the rest (Provost and Domingos, 2000, without weights)."""
AVERAGE_PRECISION = Metric("average_precision", higher_is_better=True, is_fraction=True)
"""The mean over samples with the label of the precision among all samples with a score at least as high."""
RANKING_ROWS = {ROC_AUC.name: 0, ROC_AUC_OVR.name: 0, AVERAGE_PRECISION.name: 1}
"""The metrics of a ranking, and the rows A of arrays that have their values: of labels and of classes, one area."""
MAX_RANKED = 100
"""With more labels, the scores of all samples take too much memory, and intervals of their metrics too long."""
RANKED = "ranked"
"""The name of `Task.label_scores` beside `Task.sample_sums`."""
_NUM_VALUES = 2
"""A: area and precision."""
_NUM_STEPS = 8
"""S: groups that are added up one after the other."""


def with_ranking(task: Task, figures: Mapping[str, JSON], rows_NL2: npt.NDArray[np.float32] | None) -> dict[str, JSON]:
    """Return the figures, and the task's metrics that are computed from `rows_NL2`: `Task.label_scores` of all samples.

    None: there are none.
    """
    import numpy as np

    if rows_NL2 is None:
        return dict(figures)
    values = Ranking(rows_NL2).values(np.ones((len(rows_NL2), 1)))
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

    def values(self, counts_NR: npt.NDArray[np.floating[Any]]) -> dict[str, npt.NDArray[np.float64]]:
        """Return both metrics of draws, (R,). `counts_NR`: how often each draw has each sample.

        Means over the labels that have a value: for the area, those that some samples have and others don't; for the
        precision, those that some have. 0 where no label has one, NaN where a score is NaN. Counts are added in their
        own type: in float32, a draw may have up to 2^24 samples.
        """
        import numpy as np

        sums_AR, num_labels_AR = np.zeros((2, _NUM_VALUES, counts_NR.shape[1]))
        for label in self._labels:
            values_AR, is_known_AR = label.values(counts_NR)
            sums_AR += label.scale * values_AR
            num_labels_AR += is_known_AR
        means_AR = sums_AR / np.maximum(1, num_labels_AR)
        return {name: means_AR[row] for name, row in RANKING_ROWS.items()}

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


class _Label:
    """Samples in the order of the scores of one label, the highest first.

    `scores_N`, `has_N`: the score of each sample, and whether it has the label.
    """

    def __init__(self, scores_N: npt.NDArray[np.float32], has_N: npt.NDArray[np.bool_]) -> None:
        import numpy as np
        from scipy import sparse

        self._scores_N, self.has_N = scores_N, has_N
        self.scale = float("nan") if np.isnan(scores_N).any() else 1.0
        order_N = np.argsort(-scores_N, kind="stable")
        starts_T, is_tied_T = _groups(scores_N[order_N], has_N[order_N])
        # Group t is at t % S, t // S: sums along S are then of whole rows, which a processor adds several at a time.
        columns_T, steps_T = np.divmod(np.arange(len(starts_T)), _NUM_STEPS)
        num_places = _NUM_STEPS * (int(columns_T[-1]) + 1)
        places_T = steps_T * (num_places // _NUM_STEPS) + columns_T
        self._tied = places_T[is_tied_T]
        place_N = np.empty_like(order_N)
        place_N[order_N] = places_T.repeat(np.diff(starts_T, append=len(order_N)))
        cells = np.ones(len(place_N), np.float32), (np.where(has_N, 0, num_places) + place_N, np.arange(len(place_N)))
        self._sums = sparse.csr_array(cells, shape=(2 * num_places, len(place_N)))

    def values(self, counts_NR: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return the area and the precision of draws, and which of them are known, both (2, R)."""
        import numpy as np

        num_draws = counts_NR.shape[1]
        sums_TR = (self._sums @ counts_NR).reshape(2, -1, num_draws)
        found_TR, tied_TR = sums_TR[0].copy(), sums_TR[1, self._tied]
        sums_SCR = sums_TR.reshape(2, _NUM_STEPS, -1, num_draws)
        for step in range(1, _NUM_STEPS):
            sums_SCR[:, step] += sums_SCR[:, step - 1]
        sums_SCR += (sums_SCR[:, -1].cumsum(axis=1) - sums_SCR[:, -1])[:, None]
        found_so_far_TR, others_so_far_TR = sums_TR
        found_R, others_R = sums_TR[:, -1].astype(np.float64)
        wrong_R = _dot(found_TR, others_so_far_TR) - _dot(found_TR[self._tied], tied_TR) / 2
        others_so_far_TR += found_so_far_TR  # in place: new memory takes as long as the sums
        num_so_far_TR = np.maximum(1, others_so_far_TR, out=others_so_far_TR)
        precise_R = _dot(found_TR, np.divide(found_so_far_TR, num_so_far_TR, dtype=np.float64))
        pairs_R = found_R * others_R
        values_AR = np.stack([1 - wrong_R / np.maximum(1, pairs_R), precise_R / np.maximum(1, found_R)])
        is_known_AR = np.stack([pairs_R > 0, found_R > 0])
        return values_AR * is_known_AR, is_known_AR

    def placements(self) -> npt.NDArray[np.int64]:
        """Return the column of `Ranking.placements`."""
        import numpy as np

        found, others = (np.sort(self._scores_N[has_N]) for has_N in (self.has_N, ~self.has_N))
        found_below_N, others_below_N = (
            np.searchsorted(of, self._scores_N, "left") + np.searchsorted(of, self._scores_N, "right")
            for of in (found, others)
        )
        return np.where(self.has_N, 2 * len(others) - others_below_N, found_below_N)


def _groups(
    scores_N: npt.NDArray[np.float32], has_N: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return where groups of sorted samples start, and which have samples with the label and others of one score.

    Others above samples with the label are taken together with these: between them, no metric changes.
    """
    import numpy as np

    starts_T = np.flatnonzero(np.concatenate([[True], scores_N[1:] != scores_N[:-1]]))
    has_some_T, has_others_T = (np.logical_or.reduceat(of_N, starts_T) for of_N in (has_N, ~has_N))
    is_tied_T = has_some_T & has_others_T
    is_start_T = np.concatenate([[True], has_some_T[:-1] | is_tied_T[1:]])
    return starts_T[is_start_T], is_tied_T[np.flatnonzero(is_start_T)]


def _dot(one_TR: npt.NDArray[np.floating[Any]], other_TR: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    import numpy as np

    products_R: npt.NDArray[np.float64] = np.einsum("tr,tr->r", one_TR, other_TR, dtype=np.float64)
    return products_R
