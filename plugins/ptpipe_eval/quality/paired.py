"""What every model of a comparison made of the same samples, as facts that gates and reports read.

Shape legend: N samples, M models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_torch import Task
from ptpipe_torch.quality.bootstrap import BootstrapDrop, bootstrap_drops, totals_of
from ptpipe_torch.quality.proportions import ProportionDrop
from ptpipe_torch.quality.ranking_drops import ranking_drops
from ptpipe_torch.task.ranking import RANKED, RANKING_ROWS, added

_MAX_FLOAT16 = 65_000


class Drop(Protocol):
    """By how much a model is worse than the baseline in one metric, and how sure that is."""

    @property
    def drop(self) -> float:
        """The estimate; negative where the model is better."""
        ...

    @property
    def num_samples(self) -> int:
        """N."""
        ...

    def limits(self, confidence: float) -> tuple[float, float]:
        """Return the lower and the upper one-sided limit."""
        ...

    def p_value(self, margin: float) -> float:
        """Return the one-sided p-value against a drop of at least `margin`."""
        ...

    def num_samples_needed(self, margin: float, confidence: float) -> int | None:
        """Return how many samples decide with 80 % probability, if what was observed stays; None where none do."""
        ...


@dataclass(frozen=True, eq=False)
class ModelSamples:
    """What one model made of each sample, in the order of the split."""

    sums: Mapping[str, npt.NDArray[Any]]
    """`rows_of_samples`; without those that are not bool where they take too much memory."""
    predictions_N: npt.NDArray[np.int64] | None
    """Numbers that are equal where the predictions are; None where these are no integers, so that all differ."""
    labels_N: npt.NDArray[np.int64] | None
    """Numbers of classes; None where samples have none."""
    is_complete: bool
    """Whether all sums are there."""
    has_ranking: bool = True
    """Whether `RANKED` is there, where the task has it."""


@dataclass(frozen=True, eq=False)
class PairedSamples:
    """Facts about each sample and each model, in the order of the rows of a comparison."""

    ids: tuple[str, ...]
    baseline: int
    """Its row."""
    right: Mapping[str, npt.NDArray[np.bool_]]
    """Which samples are right, (M, N), for each metric that is the fraction of samples that are."""
    flips_MN: npt.NDArray[np.bool_] | None
    """Where the prediction differs from the baseline's; None where predictions are numbers that all differ."""
    bootstraps: Mapping[str, tuple[BootstrapDrop | None, ...]]
    """For each other metric, and each model; None for the baseline."""
    labels_N: npt.NDArray[np.int64] | None = None
    """The class of each sample; None: they have none."""
    class_names: tuple[str, ...] = ()
    scores: Mapping[str, npt.NDArray[np.float16]] = field(default_factory=dict)
    """What each sample contributes, (M, N), to each metric that is the mean of that: a loss, an absolute error."""
    too_large: tuple[str, ...] = ()
    """Metrics without an interval, as what it is computed from takes too much memory."""
    targets_sha256: str | None = None
    """See `quality.targets`; None: not known."""

    def drop(self, metric: str, row: int) -> Drop | None:
        """Return how much worse a model is in the metric; None where no interval is known."""
        if metric in self.right:
            return self._proportion(metric, row, slice(None))
        return self.bootstraps[metric][row] if metric in self.bootstraps else None

    def class_drops(self, metric: str, row: int) -> list[tuple[str, ProportionDrop]]:
        """Return the drop among the samples of each class that has some, by its name."""
        if self.labels_N is None or metric not in self.right:
            return []
        found = []
        for number, name in enumerate(self.class_names):
            is_own_N = self.labels_N == number
            if is_own_N.any():
                found.append((name, self._proportion(metric, row, is_own_N)))
        return found

    def _proportion(self, metric: str, row: int, samples: slice | npt.NDArray[np.bool_]) -> ProportionDrop:
        base_N, own_N = (self.right[metric][number][samples] for number in (self.baseline, row))
        return ProportionDrop(int((base_N & ~own_N).sum()), int((own_N & ~base_N).sum()), len(base_N))


def pair(task: Task, models: Sequence[ModelSamples], baseline: int, ids: Sequence[str], seed: int) -> PairedSamples:
    """Return the facts of models that were evaluated on the same samples, `ids`. Raises StageError for others."""
    for model in models:
        num_samples = next((len(rows) for rows in model.sums.values()), len(ids))
        if num_samples != len(ids):
            raise StageError(f"a model was evaluated on {num_samples} of {len(ids)} samples: they must be the same")
    first = models[0]
    right = {
        name: np.stack([model.sums[name] for model in models])
        for name, rows_N in first.sums.items()
        if rows_N.dtype == np.bool_ and rows_N.ndim == 1
    }
    flips_MN = None
    if first.predictions_N is not None:
        predictions_MN = np.stack([model.predictions_N for model in models if model.predictions_N is not None])
        flips_MN = predictions_MN != predictions_MN[baseline]
    return PairedSamples(
        ids=tuple(ids),
        baseline=baseline,
        right=right,
        flips_MN=flips_MN,
        bootstraps=_bootstraps(task, models, baseline, right.keys(), seed),
        labels_N=first.labels_N,
        class_names=_class_names(task, first),
        scores=_scores(task, models),
        too_large=_too_large(task, first, right.keys()),
    )


def _too_large(task: Task, model: ModelSamples, proportions: Any) -> tuple[str, ...]:
    lost = () if model.has_ranking else RANKING_ROWS
    names = (metric.name for metric in task.metrics if metric.name not in proportions)
    return tuple(name for name in names if not model.is_complete or name in lost)


def _scores(task: Task, models: Sequence[ModelSamples]) -> dict[str, npt.NDArray[np.float16]]:
    """Return the contributions of samples to the metrics that are their mean, where float16 has them all."""
    if not all(model.is_complete for model in models):
        return {}
    found = {}
    values = [_metric_values(task, model.sums) for model in models]
    for metric in task.metrics:
        rows = [model.sums.get(metric.name) for model in models]
        if any(row is None or not np.issubdtype(row.dtype, np.floating) for row in rows):
            continue
        scores_MN = np.stack([row.reshape(len(row), -1).mean(axis=1) for row in rows if row is not None])
        metric_M = [float(of[metric.name][0]) for of in values]
        if np.allclose(scores_MN.mean(axis=1), metric_M, rtol=1e-9, atol=0) and np.abs(scores_MN).max() < _MAX_FLOAT16:
            found[metric.name] = scores_MN.astype(np.float16)
    return found


def _metric_values(task: Task, sums: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[np.float64]]:
    return task.metric_values(totals_of(added(sums)), len(next(iter(sums.values()))))


def _bootstraps(
    task: Task, models: Sequence[ModelSamples], baseline: int, proportions: Any, seed: int
) -> dict[str, tuple[BootstrapDrop | None, ...]]:
    missing = {*proportions, *_too_large(task, models[0], proportions)}
    metrics = [metric for metric in task.metrics if metric.name not in missing]
    others = [number for number in range(len(models)) if number != baseline]
    if not metrics or not others:
        return {}
    rows = [models[number].sums for number in (baseline, *others)]
    ranked = [own[RANKED] for own in rows if RANKED in own]
    of_sums = [metric for metric in metrics if not ranked or metric.name not in RANKING_ROWS]
    sums = [added(own) for own in rows]
    found = bootstrap_drops(sums[0], sums[1:], of_sums, task.metric_values, seed, task.worst_sums)
    if ranked:
        of_ranking = ranking_drops(ranked[0], ranked[1:], seed)
        found = [{**one, **other} for one, other in zip(found, of_ranking, strict=True)]
    known = [metric.name for metric in metrics if all(of[metric.name].is_finite for of in found)]
    by_row = dict(zip(others, found, strict=True))
    return {name: tuple(by_row[row][name] if row in by_row else None for row in range(len(models))) for name in known}


def _class_names(task: Task, model: ModelSamples) -> tuple[str, ...]:
    if model.labels_N is None:
        return ()
    names: tuple[str, ...] = getattr(task, "class_names", ())
    return names or tuple(map(str, range(int(model.labels_N.max(initial=0)) + 1)))
