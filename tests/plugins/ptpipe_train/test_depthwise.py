"""Depthwise convolutions compute in float32 under autocast on a CPU; all else stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import FunctionRef, Model, builder
from ptpipe_train.depthwise import keep_depthwise_float32
from ptpipe_train.device import DeviceSettings

from .conftest import Lab, assert_same_bits

BF16 = DeviceSettings(torch.device("cpu"), "bf16")


@builder
def separable_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def make_model(lab: Lab) -> Model:
    return lab.make_model(FunctionRef.to(separable_net))


DEPTHWISE: dict[str, Callable[[], nn.Module]] = {
    "1-d": lambda: nn.Conv1d(6, 6, 3, groups=6),
    "2-d with a stride": lambda: nn.Conv2d(6, 6, 3, stride=2, groups=6),
    "two outputs a channel": lambda: nn.Conv2d(6, 12, 5, groups=6),
    "transposed": lambda: nn.ConvTranspose2d(6, 6, 2, stride=2, groups=6),
    "3-d": lambda: nn.Conv3d(6, 6, 3, groups=6),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(6, 6, 3),
    "one channel": lambda: nn.Conv2d(1, 6, 3),
    "groups of two": lambda: nn.Conv2d(6, 6, 3, groups=3),
    "linear": lambda: nn.Linear(7, 3),
}


def input_of(layer: Any) -> torch.Tensor:
    sizes = [7] * (layer.weight.dim() - 2)
    return torch.randn(2, getattr(layer, "in_channels", 7), *sizes)


def gradients(layer: nn.Module, x: torch.Tensor, *, autocast: bool) -> list[torch.Tensor]:
    """Return the output and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("make", DEPTHWISE.values(), ids=DEPTHWISE.keys())
def test_a_depthwise_convolution_computes_in_float32(make: Callable[[], nn.Module]) -> None:
    layer = make()
    x = input_of(layer)
    expected = gradients(layer, x, autocast=False)
    keep_depthwise_float32(layer)
    for autocast in (True, False):
        for value, wanted in zip(gradients(layer, x, autocast=autocast), expected, strict=True):
            assert value.dtype is torch.float32 and torch.equal(value, wanted)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_other_layers_compute_in_bf16(make: Callable[[], nn.Module]) -> None:
    layer = make()
    keep_depthwise_float32(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(input_of(layer)).dtype is torch.bfloat16


def test_inputs_in_bf16_and_given_by_keyword_are_taken() -> None:
    layer = nn.Conv2d(6, 6, 3, groups=6)
    keep_depthwise_float32(layer)
    x = torch.randn(2, 6, 7, 7).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(input=x)
    assert torch.equal(y, layer(x.float()))


def test_type_names_and_state_stay_and_twice_is_once() -> None:
    network = separable_net()
    before = {name: (type(layer).__name__, type(layer).__module__) for name, layer in network.named_modules()}
    state = list(network.state_dict())
    keep_depthwise_float32(network)
    types = [type(layer) for layer in network.modules()]
    keep_depthwise_float32(network)
    assert [type(layer) for layer in network.modules()] == types
    assert types != [type(layer) for layer in separable_net().modules()]
    named = copy.deepcopy(network).named_modules()
    assert {name: (type(layer).__name__, type(layer).__module__) for name, layer in named} == before
    assert list(network.state_dict()) == state


@pytest.mark.parametrize("is_qat", [False, True], ids=["float", "QAT"])
def test_a_network_placed_for_bf16_has_them(lab: Lab, *, is_qat: bool) -> None:
    model = make_model(lab)
    if is_qat:
        model = prepare_qat(PrepareQatConfig(backend="fbgemm"), lab.context(), model)
    network, dtypes = BF16.place(model.build_prepared()), {}
    for name in ("0", "1", "4"):  # also where a layer of another type is in its place
        network.get_submodule(name).register_forward_hook(
            lambda layer, args, y, name=name: dtypes.__setitem__(name, y.dtype)
        )
    with BF16.autocast():
        network(torch.randn(2, 1, 8, 8))
    assert dtypes == {"0": torch.bfloat16, "1": torch.float32, "4": torch.bfloat16}


def test_nothing_changes_in_fp32(lab: Lab) -> None:
    placed = DeviceSettings(torch.device("cpu")).place(make_model(lab).build_prepared())
    assert [type(layer) for layer in placed.modules()] == [type(layer) for layer in separable_net().modules()]


@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": ["Conv2d"]}, {"ema": {"decay": 0.9}}],
    ids=["gradient checkpointing", "averaged weights"],
)
def test_other_options_find_the_layers(lab: Lab, options: dict[str, Any]) -> None:
    model, data = make_model(lab), lab.make_data(64, 20)
    plain = lab.train_afresh(model, data, epochs=2, precision="bf16")
    other = lab.train_afresh(model, data, epochs=2, precision="bf16", **options)
    if "gradient_checkpointing" in options:
        assert_same_bits(plain.model, other.model)
    assert plain.metrics["history"][-1]["train_loss"] == other.metrics["history"][-1]["train_loss"]


def test_a_teacher_computes_as_it_would_in_a_training(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[nn.Module] = []
    place = DeviceSettings.place
    monkeypatch.setattr(DeviceSettings, "place", lambda self, module: placed.append(place(self, module)) or placed[-1])
    model, distillation = make_model(lab), {"weight": 0.5}
    lab.train(model, lab.make_data(32), model, epochs=1, precision="bf16", distillation=distillation)
    assert len(placed) == 3  # the teacher, the network, and the one that is delivered
    assert len({type(module.get_submodule("1")) for module in placed}) == 1
    assert type(placed[0].get_submodule("1")) is not nn.Conv2d
