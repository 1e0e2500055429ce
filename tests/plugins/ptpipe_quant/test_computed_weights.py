"""Weights that a forward pass computes from parameters alone become parameters of int8 layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ptpipe import Context
from ptpipe.events import Event, LogLine, Notice
from ptpipe_onnx import ExportConfig, export_onnx
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
from ptpipe_quant.repairs import equalize
from ptpipe_quant.repairs.config import EqualizeConfig
from ptpipe_quant.trace import trace_network
from ptpipe_torch import Data, builder
from ptpipe_train import TrainConfig
from ptpipe_train import train as supervised

from ...signatures import pictures
from .conftest import BACKENDS, NUM_CLASSES, make_model, small_net, train
from .library_styles import build
from .spellings import INPUT_SHAPE_CHW

F = nn.functional


class Standardized(nn.Conv2d):
    """A convolution with weight standardization and a gain, as in normalizer-free networks."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.linspace(0.5, 2, self.out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.batch_norm(self.weight.reshape(1, len(self.gain), -1), None, None, self.gain, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


class JoinedBias(nn.Module):
    """A linear layer for queries, keys and values; the keys have no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 24, bias=False)
        self.q, self.v = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("k", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.qkv.weight, torch.cat((self.q, self.k, self.v)))


class Combined(nn.Module):
    """Two convolutions as one, whose weight and bias depend on the same parameter, as in networks for EEG."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.reads = nn.Conv2d(1, 4, (3, 1)), nn.Conv2d(4, 6, (1, 3), bias=False), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.first.weight * self.second.weight.permute(1, 0, 2, 3)).sum(0).unsqueeze(1)
        bias = torch.matmul(self.second.weight.squeeze().sum(-1), self.first.bias[:, None]).squeeze()
        y = F.conv2d(x, weight, bias)
        return y * self.first.bias.mean() if self.reads else y


class Masked(nn.Module):
    """Causal convolutions, whose weights are multiplied by one mask; it is also read by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 1.0, 0.0]).repeat(3, 1))
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.mask, torch.Tensor)
        twice = 2 * self.mask
        y = F.relu(F.conv2d(x, self.first.weight * twice, self.first.bias, padding=1))
        return F.conv2d(y, self.second.weight * twice, self.second.bias, padding=1) + self.mask.mean()


class MaskedAsLarge(nn.Conv2d):
    """A convolution with a mask of the size of its weight."""

    def __init__(self) -> None:
        super().__init__(1, 4, 3)
        self.register_buffer("mask", (torch.rand_like(self.weight) > 0.5).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.mask, torch.Tensor)
        return F.conv2d(x, self.mask * self.weight, self.bias)


class Computing(nn.Module):
    """A weight that something else depends on, too, or that is drawn."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "dropped":
            return F.linear(x, F.dropout(self.w * 2, 0.5, self.training))
        w = F.normalize(self.w)
        return F.linear(x, w) * (w.mean() if self.kind == "read" else self.w.mean() if self.kind == "its source" else 1)


@builder
def standardized() -> nn.Module:
    return nn.Sequential(
        Standardized(1, 8, 3), nn.ReLU(), Standardized(8, 4, 3), nn.Flatten(), nn.Linear(64, NUM_CLASSES)
    )


@builder
def deeper() -> nn.Module:
    return nn.Sequential(
        Standardized(1, 8, 3), nn.ReLU(), Standardized(8, 4, 3), nn.Flatten(),
        nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES),
    )  # fmt: skip


@builder
def joined() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), JoinedBias(), nn.Linear(24, NUM_CLASSES))


@builder
def masked() -> nn.Module:
    return nn.Sequential(Masked(), nn.Flatten(), nn.Linear(256, NUM_CLASSES))


def behind_linear(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), layer)


def computed(network: nn.Module, *leaves: str) -> list[str]:
    """Return what is stored, after a check that the network is the same function."""
    x = torch.randn(3, 1, 8, 8)
    expected = network.eval()(x)
    traced = trace_network(network, pictures((1, 8, 8)), leaves)
    torch.testing.assert_close(traced.graph(x), expected, rtol=1e-5, atol=1e-5)
    return traced.computed_weights


def test_the_layer_has_its_modules_name_and_nothing_is_left_of_the_parts() -> None:
    network = standardized()
    names = [name for name, _ in network.named_parameters() if not name.endswith("gain")]
    traced = trace_network(network, pictures((1, 8, 8)))
    assert traced.computed_weights == ["0.weight", "2.weight"]
    assert sorted(name for name, _ in traced.graph.named_parameters()) == sorted(names)
    assert traced.kept_float == {}
    assert all(parameter.requires_grad for parameter in traced.graph.parameters())


def test_a_weight_and_a_bias_of_the_same_parameters() -> None:
    layers = nn.Sequential(Combined(), nn.Flatten(), nn.Linear(216, 4))
    assert sorted(computed(layers)) == ["0.first.bias", "0.second.weight"]
    assert computed(nn.Sequential(Combined(reads=True), nn.Flatten(), nn.Linear(216, 4))) == []


def test_a_mask_may_be_read_by_others() -> None:
    assert computed(nn.Sequential(Masked(), nn.Flatten(), nn.Linear(256, 4))) == ["0.first.weight", "0.second.weight"]


def test_the_weight_gives_the_name_where_a_mask_is_as_large() -> None:
    assert computed(nn.Sequential(MaskedAsLarge(), nn.Flatten(), nn.Linear(144, 4))) == ["0.weight"]


def test_a_weight_that_is_frozen_stays_so_beside_a_trained_bias() -> None:
    layer = JoinedBias()
    layer.qkv.weight.requires_grad_(False)
    layer.forward = lambda x: F.linear(x, layer.qkv.weight * 2, torch.cat((layer.q, layer.k, layer.v)))  # type: ignore[method-assign]
    traced = trace_network(behind_linear(layer), pictures((1, 8, 8)))
    assert len(traced.computed_weights) == 2
    frozen = [parameter.dim() for parameter in traced.graph.parameters() if not parameter.requires_grad]
    assert frozen == [2]


def test_the_function_is_the_same() -> None:
    assert computed(standardized()) == ["0.weight", "2.weight"]
    assert computed(joined()) == ["3.q"]
    assert computed(standardized(), "2") == ["0.weight"]
    assert computed(behind_linear(Computing("alone"))) == ["2.w"]


@pytest.mark.parametrize("kind", ["dropped", "read", "its source"])
def test_what_training_could_tell_apart_stays(kind: str) -> None:
    network = behind_linear(Computing(kind))
    assert computed(network) == []
    assert "computed in the forward pass" in str(trace_network(network, pictures((1, 8, 8))).kept_float)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("network", [standardized, joined])
def test_static(network: Any, backend: str, digits: Data, ctx: Context, events: list[Event], metrics: Any) -> None:
    prepared = prepare(PrepareConfig(backend=backend), ctx, make_model(network))
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    assert metrics()["int8_layers"] == 3
    assert metrics()["float_layers"] == []
    assert not [event for event in events if isinstance(event, Notice)]
    export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)
    assert metrics()["max_layer_difference_steps"] <= 1


def test_qat_trains_what_was_computed(digits: Data, ctx: Context, events: list[Event], metrics: Any) -> None:
    prepared = prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(standardized))
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert notice.startswith(
        "the weights of 0.weight, 2.weight are computed from other parameters (in the forward pass)"
    )
    convert(ConvertConfig(), ctx, train(prepared, digits, lr=1e-3))
    assert metrics()["int8_layers"] == 3


def test_qat_keeps_what_is_masked(digits: Data, ctx: Context, events: list[Event], metrics: Any) -> None:
    prepared = prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(masked))
    assert prepared.recipe.pruned == ("0.first.weight", "0.second.weight")
    lines = [event.text for event in events if isinstance(event, LogLine) and "masked" in event.text]
    assert lines == [
        f"{name} has zeros, as a masked weight does: training keeps them" for name in prepared.recipe.pruned
    ]
    trained = supervised(TrainConfig(epochs=1), ctx, prepared, digits)
    for name in ("0.first.weight", "0.second.weight"):
        assert not torch.equal(trained.tensors[name], prepared.tensors[name])
        assert not trained.tensors[name][..., 2].any()
        assert trained.tensors[name][..., :2].all()
    convert(ConvertConfig(), ctx, trained)
    assert metrics()["int8_layers"] == 3


def test_repairs_leave_them_as_they_are(ctx: Context) -> None:
    model = make_model(deeper)
    repaired = equalize(EqualizeConfig(), ctx, model)
    for name in ("0.weight", "0.gain", "2.weight", "2.gain"):
        assert torch.equal(repaired.tensors[name], model.tensors[name])
    assert not torch.equal(repaired.tensors["4.weight"], model.tensors["4.weight"])


def test_a_weight_that_is_brought_to_the_inputs_device_is_stored() -> None:
    network = build("blurred")
    x = torch.randn(3, *INPUT_SHAPE_CHW)
    expected = network(x)
    traced = trace_network(network, pictures(INPUT_SHAPE_CHW))
    torch.testing.assert_close(traced.graph(x), expected, rtol=1e-5, atol=1e-5)
    assert traced.computed_weights == ["kernel"]
    layer = traced.graph.get_submodule("kernel")
    assert isinstance(layer, nn.Conv2d)
    assert layer.groups == 8
    assert not layer.weight.requires_grad


@builder
def masked_by_torch() -> nn.Module:
    network = small_net()
    prune.l1_unstructured(network.get_submodule("4"), "weight", 0.5)
    return network


@pytest.mark.parametrize(("stage", "config"), [(prepare, PrepareConfig), (prepare_qat, PrepareQatConfig)])
def test_what_torch_has_pruned_is_a_weight_with_zeros(ctx: Context, stage: Any, config: Any) -> None:
    prepared = stage(config(backend=BACKENDS[0]), ctx, make_model(masked_by_torch))
    (weight,) = (tensor for name, tensor in prepared.tensors.items() if name in ("4.weight", "4.0.weight"))
    assert (weight == 0).float().mean() == 0.5
    assert prepared.recipe.pruned == (("4.weight",) if stage is prepare_qat else ())
