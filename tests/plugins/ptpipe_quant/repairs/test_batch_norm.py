"""Batch norm re-estimation: the formula, rounded weights, both places, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptpipe import StageError
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_quant.repairs import reestimate_batch_norm
from ptpipe_quant.repairs.config import ReestimateBatchNormConfig
from ptpipe_torch import Model

from ..conftest import BACKENDS, accuracy, logits_of, make_model, normalized_by_batch, train
from .conftest import difference, static_int8, with_uneven_channels

FIRST = BACKENDS[0]


def test_statistics_are_those_of_all_samples(separable, digits, ctx) -> None:
    config = ReestimateBatchNormConfig(backend=FIRST, skip=("0",), num_samples=100)
    model = reestimate_batch_norm(config, ctx, separable, digits)
    (batch,) = digits.batches("calibration", order_N=np.arange(100), batch_size=100)
    with torch.no_grad():
        values = separable.build()[0](batch.inputs["images"]).transpose(0, 1).flatten(1)
    assert torch.allclose(model.tensors["1.running_mean"], values.mean(1), rtol=1e-4, atol=1e-5)
    assert torch.allclose(model.tensors["1.running_var"], values.var(1), rtol=1e-4)
    changed = {name for name in model.tensors if not torch.equal(model.tensors[name], separable.tensors[name])}
    assert changed == {f"{norm}.running_{what}" for norm in (1, 4, 7, 11, 14) for what in ("mean", "var")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_with_one_scale_per_weight_loses_less(separable, digits, ctx, metrics, backend) -> None:
    uneven = with_uneven_channels(separable)
    config = ReestimateBatchNormConfig(backend=backend, weights="per_tensor")
    repaired = reestimate_batch_norm(config, ctx, uneven, digits)
    assert metrics()["batch_norms"] == 5
    assert metrics()["largest_shift"] > 0.1
    before, after = (
        difference(static_int8(model, digits, ctx, backend=backend), separable, digits) for model in (uneven, repaired)
    )
    assert after < 0.8 * before


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_behind_quantization_aware_training(separable, digits, ctx, backend) -> None:
    prepared = prepare_qat(PrepareQatConfig(backend=backend, batch_norm="train"), ctx, separable)
    tuned = train(prepared, digits, lr=0.005)
    repaired = reestimate_batch_norm(ReestimateBatchNormConfig(), ctx, tuned, digits)
    assert repaired.recipe == tuned.recipe
    changed = {name for name in tuned.tensors if not torch.equal(tuned.tensors[name], repaired.tensors[name])}
    assert changed
    assert all(name.endswith(("running_mean", "running_var")) for name in changed)
    int8 = convert(ConvertConfig(), ctx, repaired)
    assert accuracy(logits_of(int8, digits), digits) > accuracy(logits_of(separable, digits), digits) - 0.02


def test_refused_where_batch_norms_are_folded(separable, digits, ctx) -> None:
    config = ReestimateBatchNormConfig()
    prepared = prepare(PrepareConfig(backend=FIRST), ctx, separable)
    folded = prepare_qat(PrepareQatConfig(backend=FIRST, batch_norm="fold"), ctx, separable)
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    for model in (prepared, folded, int8):
        with pytest.raises(StageError, match=r"are folded into its weights already. Put it in front of quant.prepare"):
            reestimate_batch_norm(config, ctx, model, digits)
    with pytest.raises(StageError, match=r"no batch norm with running statistics"):
        reestimate_batch_norm(config, ctx, make_model(normalized_by_batch), digits)


def test_values_that_are_not_finite_name_the_layer(separable, digits, ctx) -> None:
    state = {name: tensor.clone() for name, tensor in separable.tensors.items()}
    state["0.weight"][0, 0, 0, 0] = float("nan")
    with pytest.raises(StageError, match=r"the input of 1 is not finite"):
        reestimate_batch_norm(ReestimateBatchNormConfig(skip=("0",)), ctx, Model(separable.recipe, state), digits)
