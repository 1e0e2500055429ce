"""Accept a model of a run as the baseline of later ones. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from ptpipe import UsageError
from ptpipe_eval.baseline.file import (
    AcceptedMetric,
    AcceptedModel,
    AcceptedRun,
    Baseline,
    Order,
    SampleSet,
    packed_bits,
    packed_scores,
)
from ptpipe_eval.baseline.past_run import PastComparison
from ptpipe_torch import Metric


def accepted(past: PastComparison, model: str | None) -> Baseline:
    """Return the baseline that a run's model makes. `model`: its name; None: the only one beside the baseline's.

    Raises UsageError where it is not clear which one, or what it made of the samples is not known.
    """
    table, record = past.table, past.record
    others = [row.name for row in table.rows if row.name != table.baseline or len(table.rows) == 1]
    if model is None and len(others) != 1:
        raise UsageError(f"the comparison has several models: choose one by --model, {' or '.join(others)}")
    row = past.row(model or others[0])
    number, order = table.rows.index(row), Order.of(past.samples.ids)
    metrics = [_metric(past, metric, number, order, row.metrics[metric.name]) for metric in table.metrics]
    kept = [metric for metric in metrics if metric.right is not None or metric.scores is not None]
    if not kept:
        names = ", ".join(metric.name for metric in metrics)
        raise UsageError(f"what the model made of each sample is not known for {names}: these can't be a baseline")
    if not past.inputs:
        raise UsageError(f"the models of run {record['run_id']} are not known any more: accept one of a later run")
    (data,) = past.inputs["data"]
    return Baseline(
        accepted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=AcceptedModel(
            name=row.name, format=row.format, digest=past.inputs["models"][number], size_bytes=row.size_bytes
        ),
        data=SampleSet(
            name=table.data,
            split=table.split,
            digest=data,
            num_samples=table.num_samples,
            ids_sha256=order.ids_sha256,
            targets_sha256=past.samples.targets_sha256,
        ),
        metrics=tuple(metrics),
        run=AcceptedRun(
            id=record["run_id"],
            manifest=record["name"],
            stage=past.stage["stage_id"],
            seed=record["seed"],
            measured_at=table.measured_at,
        ),
        environment=dict(past.stage.get("environment", {})),
    )


def _metric(past: PastComparison, metric: Metric, row: int, order: Order, value: float) -> AcceptedMetric:
    right, scores = past.samples.right.get(metric.name), past.samples.scores.get(metric.name)
    return AcceptedMetric(
        name=metric.name,
        higher_is_better=metric.higher_is_better,
        is_fraction=metric.is_fraction,
        value=value,
        right=None if right is None else packed_bits(right[row][order.positions_N]),
        scores=None if scores is None else packed_scores(scores[row][order.positions_N]),
    )


def differences(old: Baseline, new: Baseline) -> Iterator[str]:
    """Yield a line for each thing that accepting `new` in place of `old` changes."""
    if old.model.digest != new.model.digest:
        yield f"model: {_model(old)} -> {_model(new)}"
    if old.data.ids_sha256 != new.data.ids_sha256:
        yield f"samples: {_samples(old)} -> {_samples(new)}"
    elif old.data.targets_sha256 != new.data.targets_sha256:
        yield f"targets: those of {_samples(new)} differ, or are known of one alone"
    elif old.data.digest != new.data.digest:
        yield f"data set: {old.data.digest[:12]} -> {new.data.digest[:12]}, the same ids"
    before = {metric.name: metric for metric in old.metrics}
    for metric in new.metrics:
        known = before.pop(metric.name, None)
        if known is None:
            yield f"{metric.name}: {_shown(metric)}, not there before"
        elif known.value != metric.value or (known.right, known.scores) != (metric.right, metric.scores):
            yield f"{metric.name}: {_shown(known)} -> {_shown(metric)}"
    for metric in before.values():
        yield f"{metric.name}: {_shown(metric)} -> not there"


def describe(baseline: Baseline) -> str:
    """Return the model, its primary metric and its samples in one line."""
    primary = baseline.metrics[0]
    name = primary.name.replace("_", " ")
    return f"{_model(baseline)}: {name} {_shown(primary)} on {_samples(baseline)}"


def _model(baseline: Baseline) -> str:
    model = baseline.model
    return f"{model.name} ({model.format}, {model.size_bytes:,} bytes, {model.digest[:12]})"


def _samples(baseline: Baseline) -> str:
    data = baseline.data
    return f"{data.num_samples:,} samples of {data.name}, {data.split} ({data.ids_sha256[:12]})"


def _shown(metric: AcceptedMetric) -> str:
    return f"{100 * metric.value:.3f} %" if metric.is_fraction else f"{metric.value:.6g}"
