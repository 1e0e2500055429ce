"""QAT layers against torch's own: outputs, gradients, statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.nn import qat as qat_layers
from torch.ao.nn.intrinsic import qat as fused_qat_layers

from ptpipe_quant.fake_quant import qat_qconfig
from ptpipe_quant.qat_layers import freeze_batch_norm, qat_layer
from ptpipe_torch import TrainingCallback

QCONFIG = qat_qconfig(per_channel=True, freeze_at=0.5)
SHAPES = {"1d": (6, 3, 9), "2d": (6, 3, 9, 7), "3d": (6, 3, 5, 4, 6)}


def stock_layer(name: str, dimensions: str, *, bias: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layer = getattr(fused_qat_layers, name + dimensions)(3, 5, 3, stride=2, padding=1, bias=bias, qconfig=QCONFIG)
    nn.init.normal_(layer.weight)
    nn.init.uniform_(layer.bn.weight, 0.5, 2)
    nn.init.normal_(layer.bn.bias)
    layer.bn.running_var.uniform_(0.5, 3)
    layer.bn.running_mean.normal_()
    return layer


def linear_layer() -> nn.Module:
    torch.manual_seed(0)
    layer = fused_qat_layers.LinearBn1d(7, 5, qconfig=QCONFIG)
    nn.init.uniform_(layer.bn.weight, 0.5, 2)
    nn.init.normal_(layer.bias)
    layer.bn.running_var.uniform_(0.5, 3)
    return layer


def outcome(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients, **{f"{k} now": v.clone() for k, v in layer.state_dict().items()}}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dimensions", ["1d", "2d", "3d"])
@pytest.mark.parametrize("name", ["ConvBn", "ConvBnReLU"])
@pytest.mark.parametrize("frozen", [False, True])
def test_same_as_torchs_own(name, dimensions, bias, frozen) -> None:
    stock = stock_layer(name, dimensions, bias=bias).train()
    twin = qat_layer(copy.deepcopy(stock), 0.5).train()
    if frozen:
        stock.freeze_bn_stats()
        twin.on_progress(0.5)
    x = torch.randn(SHAPES[dimensions], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(outcome(twin, x), outcome(stock, x), rtol=1e-4, atol=1e-4)
    twin.load_state_dict(stock.state_dict())
    torch.testing.assert_close(twin.eval()(x), stock.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_backward_pass_keeps_one_copy_of_the_weights(frozen) -> None:
    layer = fused_qat_layers.ConvBn2d(64, 64, 3, qconfig=QCONFIG)
    twin = qat_layer(layer, 0.5).train()
    twin.on_progress(0.5 if frozen else 0.0)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == layer.weight.shape:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = twin(torch.randn(2, 64, 4, 4))
    assert sum(kept.values()) == 2 * layer.weight.nbytes  # the parameter, and what the convolution takes
    y.sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_linear_layers_as_well(frozen) -> None:
    stock = linear_layer().train()
    twin = qat_layer(copy.deepcopy(stock), 0.5).train()
    if frozen:
        stock.freeze_bn_stats()
        twin.on_progress(0.5)
    x = torch.randn(11, 7)
    torch.testing.assert_close(outcome(twin, x), outcome(stock, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("scale", [nn.Parameter(torch.linspace(-0.5, 2, 5)), nn.Parameter(torch.tensor(0.3)), -0.2])
def test_what_an_output_is_multiplied_by_is_part_of_the_rounded_weights(scale, per_channel) -> None:
    torch.manual_seed(0)
    layer = qat_layers.Conv2d(3, 5, 3, qconfig=qat_qconfig(per_channel=per_channel, freeze_at=0.5)).train()
    twin, x = qat_layer(copy.deepcopy(layer), 0.5), torch.randn(2, 3, 7, 7)

    def outcome_of(y: torch.Tensor, of: nn.Module) -> list[torch.Tensor]:
        leaves = [of.weight, of.bias, *([scale] if isinstance(scale, nn.Parameter) else [])]
        return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), leaves)]

    factor = scale.reshape(-1, 1, 1, 1) if isinstance(scale, nn.Parameter) else scale
    weight, bias = layer.weight_fake_quant(layer.weight * factor), layer.bias * torch.as_tensor(scale)
    expected = outcome_of(nn.functional.conv2d(x, weight, bias), layer)
    torch.testing.assert_close(outcome_of(twin(x, scale), twin), expected, rtol=1e-4, atol=1e-5)


def test_a_dead_channel_gives_its_bias_and_no_nan() -> None:
    layer = qat_layer(stock_layer("ConvBn", "2d", bias=False), 1.0).train()
    with torch.no_grad():
        layer.bn.weight[2] = 0
    results = outcome(layer, torch.randn(SHAPES["2d"]))
    assert all(value.isfinite().all() for value in results.values() if value.is_floating_point())
    assert torch.equal(results["y"][:, 2], layer.bn.bias[2].expand_as(results["y"][:, 2]))


def test_the_batch_norm_freezes_and_thaws_with_the_schedule() -> None:
    layer = qat_layer(stock_layer("ConvBn", "2d", bias=False), 0.5)
    assert isinstance(layer, TrainingCallback)
    x = torch.randn(SHAPES["2d"]) + 5
    for fraction, moves in ((0.0, True), (0.49, True), (0.5, False), (0.99, False), (0.1, True)):
        layer.train()  # as a trainer does after each evaluation
        layer.on_progress(fraction)
        before = layer.bn.running_mean.clone()
        layer(x)
        assert (not torch.equal(layer.bn.running_mean, before)) is moves


def test_a_lone_batch_norm_freezes_as_well() -> None:
    layer: Any = nn.BatchNorm2d(3)
    names = layer.state_dict().keys()
    freeze_batch_norm(layer, 0.5)
    assert isinstance(layer, nn.BatchNorm2d) and isinstance(layer, TrainingCallback)
    assert layer.state_dict().keys() == names
    layer.train()
    layer.on_progress(0.7)
    x = torch.randn(4, 3, 5, 5) + 3
    torch.testing.assert_close(layer(x), x / (1 + layer.eps) ** 0.5)
    layer.train()
    layer.on_progress(0.2)
    assert layer(x).mean().abs() < 1e-5


def test_other_layers_and_other_padding_are_left_to_torch() -> None:
    assert qat_layer(nn.Conv2d(1, 1, 1), 1.0) is None
    layer = stock_layer("ConvBn", "2d", bias=False)
    layer.padding_mode = "reflect"
    assert qat_layer(layer, 1.0) is None
