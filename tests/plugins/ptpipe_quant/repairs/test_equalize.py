"""Equalization: the same function, weights that fit one scale, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_quant.repairs import equalize
from ptpipe_quant.repairs.config import EqualizeConfig
from ptpipe_torch import Model, builder

from ..conftest import BACKENDS, NUM_CLASSES, make_model, train
from .conftest import difference, residual_net, static_int8, with_uneven_channels


def test_the_same_function_and_the_same_parameters(separable, digits, ctx, metrics) -> None:
    uneven = with_uneven_channels(separable)
    assert difference(uneven, separable, digits) < 1e-4
    equalized = equalize(EqualizeConfig(), ctx, uneven)
    assert difference(equalized, separable, digits) < 1e-4
    assert metrics()["output_difference"] < 1e-4
    assert equalized.recipe == uneven.recipe
    assert {name: tensor.shape for name, tensor in equalized.tensors.items()} == {
        name: tensor.shape for name, tensor in uneven.tensors.items()
    }
    assert metrics()["equalized_pairs"] == 5
    assert metrics()["worst_range_ratio_before"] > 20 > metrics()["worst_range_ratio"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_scale_per_weight_loses_little_afterwards(separable, digits, ctx, backend) -> None:
    uneven = with_uneven_channels(separable)
    before = static_int8(uneven, digits, ctx, backend=backend)
    after = static_int8(equalize(EqualizeConfig(), ctx, uneven), digits, ctx, backend=backend)
    assert difference(before, separable, digits) > 0.3
    assert difference(after, separable, digits) < 0.1


def test_ranges_of_neighbouring_layers_become_equal(separable, ctx) -> None:
    equalized = equalize(EqualizeConfig(), ctx, with_uneven_channels(separable)).build()
    folded = {
        conv: nn.utils.fuse_conv_bn_eval(equalized[conv], equalized[conv + 1]).weight for conv in (0, 3, 6, 10, 13)
    }
    pointwise_in = folded[6].abs().amax((0, 2, 3))
    assert torch.allclose(folded[3].abs().amax((1, 2, 3)), pointwise_in, rtol=0.01)
    flattened = equalized[17].weight.abs().amax(0).reshape(24, 16).amax(1)
    assert torch.allclose(folded[13].abs().amax((1, 2, 3)), flattened, rtol=0.01)


def with_dead_channels(model: Model, num: int) -> Model:
    """Let nothing but their biases come out of the first channels of a pointwise convolution."""
    state = {name: tensor.clone() for name, tensor in model.tensors.items()}
    state["7.weight"][:num] = 1e-12
    state["7.bias"][:num] = 0.5
    return Model(model.recipe, state)


@pytest.mark.parametrize("num", [1, 12])
def test_a_channel_that_is_nearly_dead_takes_no_range_from_the_others(separable, digits, ctx, num) -> None:
    model = with_dead_channels(separable, num)
    equalized = equalize(EqualizeConfig(), ctx, model)
    assert difference(equalized, model, digits) < 1e-4
    assert difference(static_int8(equalized, digits, ctx), model, digits) < 0.1


@pytest.mark.parametrize("change", [lambda model: model, with_uneven_channels])
def test_all_others_are_scaled_without_a_limit(separable, ctx, monkeypatch, change) -> None:
    model = change(separable)
    limited = equalize(EqualizeConfig(), ctx, model)
    monkeypatch.setattr("ptpipe_quant.repairs.equalize._MAX_GROWTH", float("inf"))
    free = equalize(EqualizeConfig(), ctx, model)
    assert all(torch.equal(limited.tensors[name], free.tensors[name]) for name in free.tensors)


def test_what_cannot_be_scaled_is_left_alone_and_named(ctx, metrics, digits) -> None:
    model = make_model(residual_net)
    equalized = equalize(EqualizeConfig(), ctx, model)
    assert difference(equalized, model, digits) < 1e-5
    changed = {name for name in model.tensors if not torch.equal(model.tensors[name], equalized.tensors[name])}
    # a -> b, behind -> left and right, hidden -> head
    assert {name.split(".")[0] for name in changed} == {"a", "b", "behind", "left", "right", "hidden", "head"}
    left_alone = dict(line.split(": ", 1) for line in metrics()["left_alone"])
    assert set(left_alone) >= {"stem", "b", "shared", "clipped", "left", "right", "head"}
    assert left_alone["clipped"] == "its output goes to relu6"
    assert left_alone["head"] == "its output goes to the network's output"


def test_a_layer_to_skip_keeps_its_weights(separable, ctx) -> None:
    equalized = equalize(EqualizeConfig(skip=("3",)), ctx, separable)
    for name in ("0.weight", "1.weight", "3.weight", "4.weight"):
        assert torch.equal(equalized.tensors[name], separable.tensors[name])
    assert not torch.equal(equalized.tensors["7.weight"], separable.tensors["7.weight"])


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_absorption_keeps_the_outputs_nearly(separable, digits, ctx, metrics, backend) -> None:
    shifted = {name: tensor.clone() for name, tensor in separable.tensors.items()}
    shifted["4.bias"] += 4 * shifted["4.weight"].abs()  # channels that ReLU never cuts off
    model = train(Model(separable.recipe, shifted), digits, lr=0.01)
    equalized = equalize(EqualizeConfig(), ctx, model)
    absorbed = equalize(EqualizeConfig(absorb_bias=True), ctx, model)
    assert metrics()["absorbed_channels"] >= 4
    assert difference(absorbed, model, digits) < 0.02
    assert (absorbed.tensors["4.bias"] < equalized.tensors["4.bias"]).any()
    assert torch.equal(absorbed.tensors["1.bias"], equalized.tensors["1.bias"])  # the next layer pads
    assert difference(static_int8(absorbed, digits, ctx, backend=backend), model, digits) < 0.1


def test_it_can_be_trained_on(separable, digits, ctx) -> None:
    uneven = with_uneven_channels(separable)
    equalized = equalize(EqualizeConfig(), ctx, uneven)
    images = next(digits.batches("train")).inputs["images"]
    one, other = (model.build().train()(images) for model in (uneven, equalized))
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)


@builder
def branching() -> nn.Module:
    """Has a line that can't be traced."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            if x.sum() > 0:
                x = -x
            return self.head(x.flatten(1))

    return Branching()


@builder
def one_layer() -> nn.Module:
    """Nothing to equalize."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, NUM_CLASSES))


def test_errors_name_the_line_and_the_remedy(separable, ctx) -> None:
    with pytest.raises(StageError, match=r"test_equalize.py:\d+: `if x.sum\(\) > 0:` can't be traced"):
        equalize(EqualizeConfig(), ctx, make_model(branching))
    with pytest.raises(StageError, match=r"no two consecutive layers can be equalized: 1 .its output goes to the"):
        equalize(EqualizeConfig(), ctx, make_model(one_layer))
    with pytest.raises(StageError, match=r"no layer of this network has the name or type 'conv9'"):
        equalize(EqualizeConfig(skip=("conv9",)), ctx, separable)
    prepared = prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, separable)
    with pytest.raises(StageError, match=r"already prepared for .*: put it in front of quant.prepare"):
        equalize(EqualizeConfig(), ctx, prepared)
