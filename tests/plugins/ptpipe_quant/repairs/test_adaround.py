"""AdaRound: smaller errors of layers, and integers that conversion keeps."""

from __future__ import annotations

import pytest
import torch

from ptpipe import StageError
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_quant.repairs import adaround
from ptpipe_quant.repairs.config import AdaroundConfig

from ..conftest import BACKENDS
from .conftest import difference, static_int8

CONFIG = AdaroundConfig(num_samples=64, num_iterations=60)


def integers(int8) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in int8.int8_tensors.items() if tensor.dtype == torch.int8}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", ["per_tensor", "per_channel"])
def test_conversion_keeps_what_was_learnt(separable, digits, ctx, metrics, backend, weights) -> None:
    options = {"backend": backend, "weights": weights}
    prepared = prepare(PrepareConfig(**options), ctx, separable)
    calibrated = calibrate(CalibrateConfig(), ctx, prepared, digits).model
    nearest = convert(ConvertConfig(), ctx, calibrated)
    learnt = adaround(CONFIG, ctx, calibrated, digits)
    num_learnt = metrics()["changed_weights"]
    assert num_learnt > 20
    converted = convert(ConvertConfig(), ctx, learnt)
    changed = [
        (one != other) for one, other in zip(integers(nearest).values(), integers(converted).values(), strict=True)
    ]
    assert sum(int(each.sum()) for each in changed) == num_learnt  # each of them, and no other
    steps = [
        (one.int() - other.int()).abs().max()
        for one, other in zip(integers(nearest).values(), integers(converted).values(), strict=True)
    ]
    assert max(steps) == 1
    scales = {name: tensor for name, tensor in nearest.int8_tensors.items() if "scale" in name}
    assert scales
    assert all(torch.equal(converted.int8_tensors[name], scale) for name, scale in scales.items())
    assert metrics()["rounded_layers"] == 6


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_comes_closer_to_float(separable, digits, ctx, metrics, backend) -> None:
    before = static_int8(separable, digits, ctx, backend=backend)
    after = static_int8(separable, digits, ctx, lambda model: adaround(CONFIG, ctx, model, digits), backend=backend)
    assert metrics()["mean_squared_error_ratio"] < 0.9
    assert difference(after, separable, digits) < difference(before, separable, digits)


def test_refuses_other_models(separable, digits, ctx) -> None:
    with pytest.raises(StageError, match=r"got a model that is float"):
        adaround(CONFIG, ctx, separable, digits)
