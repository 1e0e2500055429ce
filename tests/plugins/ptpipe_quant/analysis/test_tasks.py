"""`quant.analyze` and `quant.tune` on tasks whose metrics are no fraction of the samples.

Shape legend: N samples, F features, T targets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe.events import Event, Metric
from ptpipe_quant import AnalyzeConfig, CalibrateConfig, PrepareConfig, TuneConfig, analyze, calibrate, prepare, tune
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Data,
    DatasetInfo,
    FunctionRef,
    LoaderOptions,
    Model,
    MultiLabel,
    Recipe,
    Regression,
    Split,
    Task,
    builder,
)

from ....streets import street_data

NUM_FEATURES = 6


def rows_of(task: Task, target: str, targets_of: Callable[[np.ndarray], np.ndarray]) -> Data:
    rng = np.random.default_rng(0)
    splits = {}
    for name, size in (("train", 64), ("test", 96), ("calibration", 64)):
        x_NF = rng.normal(size=(size, NUM_FEATURES)).astype(np.float32)
        ids = np.array([f"{name}/{row}" for row in range(size)])
        targets = {target: ArrayColumn(targets_of(x_NF).astype(np.float32))}
        splits[name] = Split(ids, {"x": ArrayColumn(x_NF)}, targets)
    info = DatasetInfo("rows", {"x": ArrayInfo(dtype="float32", shape=(NUM_FEATURES,))}, task)
    return Data(info, splits, LoaderOptions(batch_size=32))


def regression() -> Data:
    task = Regression(target_names=("a", "b"), mean=(0.0, 0.0), std=(1.0, 1.0))
    return rows_of(task, "targets", lambda x_NF: x_NF[:, :2] * 2)


def multi_label() -> Data:
    return rows_of(MultiLabel(label_names=("a", "b")), "labels", lambda x_NF: x_NF[:, :2] > 0)


@builder
def linear() -> nn.Module:
    """Pass the first two features on, twice: a network that is right, so that rounding can harm it."""
    network = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for layer in network:
            layer.weight.copy_(torch.eye(*layer.weight.shape))
            layer.bias.zero_()
        network[1].weight.mul_(2)
    return network


@builder
def segmenting() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))


def metrics_of(events: list[Event]) -> dict[str, object]:
    return {event.name: event.value for event in events if isinstance(event, Metric)}


CASES = {"regression": (regression, linear), "labels": (multi_label, linear), "pixels": (street_data, segmenting)}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Model, Data]:
    make_data, build = CASES[request.param]
    data = make_data()
    return Model.from_module(Recipe(FunctionRef.to(build), data.info.signature), build()), data


def test_every_layer_has_an_effect(case, ctx: Context, events) -> None:
    model, data = case
    ready = calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(), ctx, model), data).model
    errors = analyze(AnalyzeConfig(split="test"), ctx, ready, data)
    assert errors.metric == data.info.task.primary_metric.name
    assert len(errors.layers) >= 2
    assert all(
        np.isfinite([layer.effect.drop, layer.effect.drop_low, layer.effect.drop_high]).all() for layer in errors.layers
    )
    assert abs(errors.total.drop) < 0.1
    name = data.info.task.primary_metric.drop_name
    assert errors.summary()[name] == metrics_of(events)[name] == errors.total.drop


def test_a_search_ends_where_the_budget_is_met(case, ctx: Context, events) -> None:
    model, data = case
    tuned = tune(TuneConfig(split="test", max_drop=0.2), ctx, model, data)
    name = data.info.task.primary_metric.drop_name
    assert tuned.trials.summary()[name] == metrics_of(events)[name] == tuned.trials.best.drop
    assert tuned.trials.best.is_met and np.isfinite(tuned.trials.best.drop)
