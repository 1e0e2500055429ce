"""Bias correction: means of int8 layers as in float, layers without a bias, layers that share one, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant import CalibrateConfig, PrepareConfig, PrepareQatConfig, calibrate, prepare, prepare_qat
from ptpipe_quant.repairs import bias_correct
from ptpipe_quant.repairs.config import BiasCorrectConfig
from ptpipe_torch import Data, Model, builder

from ..conftest import BACKENDS, NUM_CLASSES, logits_of, make_model
from .conftest import residual_net, static_int8


def corrected(ctx, data: Data, **options):
    return lambda model: bias_correct(BiasCorrectConfig(**options), ctx, model, data)


def with_shifted_means(model: Model) -> Model:
    """Let one large weight in each layer widen the step, so that rounding shifts means."""
    state = {name: tensor.clone() for name, tensor in model.tensors.items()}
    for name in ("3.weight", "10.weight", "17.weight"):
        state[name].view(-1)[0] *= 12
    return Model(model.recipe, state)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", ["per_tensor", "per_channel"])
def test_means_of_the_logits_are_those_of_float(separable, digits, ctx, metrics, backend, weights) -> None:
    model = with_shifted_means(separable)
    calibration = Data(digits.info, {"test": digits.splits["calibration"]}, digits.loader)
    float_K = logits_of(model, calibration).mean(0)
    shifts = []
    for repair in (lambda each: each, corrected(ctx, digits)):
        int8 = static_int8(model, digits, ctx, repair, backend=backend, weights=weights)
        shifts.append(np.abs(logits_of(int8, calibration).mean(0) - float_K).max())
    before, after = shifts
    assert after < 0.25 * before
    assert metrics()["corrected_layers"] == 6
    assert metrics()["largest_shift"] > 0.001


@builder
def without_biases() -> nn.Module:
    """Layers that have no bias: a convolution, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, NUM_CLASSES, bias=False)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_without_a_bias_get_one_that_is_stored(digits, ctx, tmp_path, backend) -> None:
    int8 = static_int8(make_model(without_biases), digits, ctx, corrected(ctx, digits, num_samples=64), backend=backend)
    assert int8.tensors["0.0.bias"].abs().max() > 0
    assert int8.tensors["3.bias"].shape == (NUM_CLASSES,)
    int8.save(tmp_path)
    assert np.array_equal(logits_of(Model.load(tmp_path), digits, 50), logits_of(int8, digits, 50))


def test_layers_that_share_a_bias_are_left_alone(digits, ctx, events) -> None:
    model = make_model(residual_net)
    prepared = prepare(PrepareConfig(backend=BACKENDS[0], skip=("prelu",)), ctx, model)
    calibrated = calibrate(CalibrateConfig(), ctx, prepared, digits).model
    repaired = bias_correct(BiasCorrectConfig(num_samples=64), ctx, calibrated, digits)
    changed = {
        name
        for name in repaired.tensors
        if name not in calibrated.tensors or not torch.equal(calibrated.tensors[name], repaired.tensors[name])
    }
    assert not any(name.startswith("shared") for name in changed)
    assert {"stem.0.bias", "a.bias", "b.bias", "head.bias"} <= changed
    assert all(name.endswith("bias") for name in changed)
    assert any("shared" in str(getattr(event, "text", "")) for event in events)


def test_it_runs_once_between_calibrate_and_convert(separable, digits, ctx) -> None:
    config = BiasCorrectConfig(num_samples=64)
    with pytest.raises(StageError, match=r"got a model that is float; .* between quant.calibrate and quant.convert"):
        bias_correct(config, ctx, separable, digits)
    prepared = prepare(PrepareConfig(backend=BACKENDS[0]), ctx, separable)
    with pytest.raises(StageError, match=r"observers saw no data"):
        bias_correct(config, ctx, prepared, digits)
    qat = prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, separable)
    with pytest.raises(StageError, match=r"got a model that is from quant.prepare_qat"):
        bias_correct(config, ctx, qat, digits)
    calibrated = calibrate(CalibrateConfig(), ctx, prepared, digits).model
    once = bias_correct(config, ctx, calibrated, digits)
    with pytest.raises(StageError, match=r"already fitted to its rounded weights"):
        bias_correct(config, ctx, once, digits)
    with pytest.raises(StageError, match=r"quant\.\w+: val has 0 samples"):
        bias_correct(BiasCorrectConfig(split="val"), ctx, calibrated, digits)
