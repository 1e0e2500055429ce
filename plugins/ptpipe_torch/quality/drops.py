"""By how much models are worse than a baseline in the primary metric of a task, on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ptpipe import StageError
from ptpipe_torch.quality.bootstrap import BootstrapDrop, Sums, bootstrap_drops, totals_of
from ptpipe_torch.quality.proportions import ProportionDrop
from ptpipe_torch.quality.ranking_drops import ranking_drops
from ptpipe_torch.task.ranking import RANKED, RANKING_ROWS, Ranking, added
from ptpipe_torch.task.task import Task


def primary_drops(
    task: Task, baseline: Sums, candidates: Sequence[Sums], seed: int
) -> list[ProportionDrop | BootstrapDrop]:
    """Return the drop of each candidate's primary metric, with its interval.

    `baseline`, `candidates`: `rows_of_samples` of the same samples. Tango's interval of paired proportions where the
    metric is a fraction of the samples, else a bootstrap of the paired samples.
    """
    name = task.primary_metric.name
    if RANKED in baseline and name in RANKING_ROWS:
        ranked = ranking_drops(baseline[RANKED], [sums[RANKED] for sums in candidates], seed)
        return [drops[name] for drops in ranked]
    right_N = baseline.get(name)
    if right_N is None or right_N.dtype != np.bool_ or right_N.ndim != 1:
        if not candidates:
            return []
        metrics = [task.primary_metric]
        pair = added(baseline), [added(sums) for sums in candidates]
        found = bootstrap_drops(*pair, metrics, task.metric_values, seed, task.worst_sums)
        return [drops[name] for drops in found]
    return [
        ProportionDrop(int((right_N & ~sums[name]).sum()), int((sums[name] & ~right_N).sum()), len(right_N))
        for sums in candidates
    ]


def finite_limits(task: Task, drop: ProportionDrop | BootstrapDrop, confidence: float) -> tuple[float, float]:
    """Return the limits of a drop in the primary metric; of a fraction of which the samples show nothing, -1 and 1.

    Raises StageError for another metric of which they show nothing.
    """
    low, high = drop.limits(confidence)
    if math.isfinite(low):
        return low, high
    metric = task.primary_metric
    if not metric.is_fraction:
        raise StageError(
            f"{metric.name}: {drop.num_samples} samples can't show a drop in it: it has the same value whatever "
            "is predicted, or there is only one: use other samples"
        )
    return -1.0, 1.0


def primary_value(task: Task, sums: Sums) -> float:
    """Return the primary metric of samples with these rows: `rows_of_samples`."""
    name, num_samples = task.primary_metric.name, len(next(iter(sums.values())))
    if RANKED in sums and name in RANKING_ROWS:
        return float(Ranking(sums[RANKED]).values(np.ones((num_samples, 1)))[name][0])
    return float(task.metric_values(totals_of(added(sums)), num_samples)[name][0])
