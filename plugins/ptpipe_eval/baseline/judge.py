"""Compare models with one that was accepted before, on the same samples. Needs numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_eval.baseline.file import Baseline, Order
from ptpipe_eval.comparison import Comparison, Row
from ptpipe_eval.quality.paired import PairedSamples
from ptpipe_torch import Metric
from ptpipe_torch.quality.bootstrap import BootstrapDrop, Floats, bootstrap_drops

_SEED = 0


def against(baseline: Baseline, table: Comparison, names: Sequence[str]) -> Comparison:
    """Return a comparison of the accepted model with these rows of a table; gates judge it as any other.

    Samples are paired by id; a metric that is no fraction or mean of theirs has no interval, so that gates can't decide
    on it. Raises StageError where the samples or their targets are others, or the metric that models are compared by
    is missing.
    """
    samples = _samples_of(table)
    order = Order.of(samples.ids)
    _check_samples(baseline, table, order, samples.targets_sha256)
    rows = [table.row(name) for name in names]
    numbers = [table.rows.index(row) for row in rows]
    right, scores = (
        {
            name: np.stack([accepted_N, *own[name][numbers][:, order.positions_N]])
            for name, accepted_N in accepted.items()
            if name in own
        }
        for accepted, own in ((baseline.right, samples.right), (baseline.scores, samples.scores))
    )
    values = {metric.name: metric.value for metric in baseline.metrics}
    metrics = tuple(metric for metric in table.metrics if metric.name in values)
    if (not right and not scores) or metrics[:1] != table.metrics[:1]:
        raise StageError(f"the baseline's {', '.join(values)} can't be compared")
    accepted_row = Row(f"the accepted {baseline.model.name}", baseline.model.format, baseline.model.size_bytes, values)
    paired = PairedSamples(
        ids=tuple(samples.ids[position] for position in order.positions_N),
        baseline=0,
        right=right,
        flips_MN=None,
        bootstraps={
            metric.name: drops
            for metric in metrics
            if metric.name in scores and (drops := _drops(scores[metric.name], metric))
        },
    )
    return replace(table, metrics=metrics, baseline=accepted_row.name, rows=(accepted_row, *rows), samples=paired)


def _samples_of(table: Comparison) -> PairedSamples:
    if table.samples is None:
        raise StageError("the comparison has no facts of single samples")
    return table.samples


def _check_samples(baseline: Baseline, table: Comparison, order: Order, targets_sha256: str | None) -> None:
    """Raise StageError where the samples, or their targets, are others than the baseline's."""
    if order.ids_sha256 != baseline.data.ids_sha256:
        raise StageError(
            f"the baseline was accepted on {baseline.data.num_samples:,} samples of {baseline.data.name}, split "
            f"{baseline.data.split}, and the comparison has {table.num_samples:,} of {table.data}, split "
            f"{table.split}, with other ids: they must be the same samples"
        )
    targets = {baseline.data.targets_sha256, targets_sha256}
    if len(targets) > 1 and None not in targets:
        raise StageError(
            f"the targets of {table.data}, split {table.split}, are others than when the baseline was accepted, and "
            "the ids are the same: the samples were replaced, or labels corrected; accept the model again, on these"
        )


def check_metric(baseline: Baseline, metric: Metric) -> None:
    """Raise StageError for a metric of which the file has no values of samples, as F1 and R2 have none."""
    paired = (*baseline.right, *baseline.scores)
    if metric.name not in paired:
        raise StageError(
            f"no drop in {metric.name} can be judged against an accepted model: it is no fraction of the samples, nor "
            f"the mean of a value of each; choose the metric {' or '.join(paired)}"
        )


def _drops(scores_MN: npt.NDArray[np.float16], metric: Metric) -> tuple[BootstrapDrop | None, ...]:
    """Return the drop of each model but the first one, whose mean score is the metric; empty where they show none."""
    accepted, *others = ({metric.name: scores_N.astype(np.float64)} for scores_N in scores_MN)
    found = [drops[metric.name] for drops in bootstrap_drops(accepted, others, [metric], _means, _SEED)]
    return (None, *found) if all(drop.is_finite for drop in found) else ()


def _means(totals: Mapping[str, Floats], num_samples: int) -> dict[str, Floats]:
    return {name: total / num_samples for name, total in totals.items()}
