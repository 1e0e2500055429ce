"""Layers at the largest integers: int8 equals the reference network, static and QAT."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant.saturation import saturating_layers
from ptpipe_quant.trace import trace_network
from ptpipe_quant.transforms import prepare_qat, prepare_static, to_int8
from ptpipe_torch.int8.engine import quantized_engine, supported_engines
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.observers import observes_activation_range

from ...signatures import pictures, stored_pictures

LAYERS: dict[str, tuple[type[nn.Module], int, dict[str, Any]]] = {
    "3x3": (nn.Conv2d, 8, {"kernel_size": 3, "padding": 1}),
    "3x3, 128 groups": (nn.Conv2d, 128, {"kernel_size": 3, "padding": 1}),  # x86 runs these on fbgemm
    "3x3, stride 2": (nn.Conv2d, 8, {"kernel_size": 3, "padding": 1, "stride": 2}),
    "3x3, two outputs": (nn.Conv2d, 8, {"kernel_size": 3, "padding": 1, "out_channels": 16}),
    "5x5": (nn.Conv2d, 8, {"kernel_size": 5, "padding": 2}),
    "7x7": (nn.Conv2d, 8, {"kernel_size": 7, "padding": 3}),
    "3x3x3": (nn.Conv3d, 8, {"kernel_size": 3, "padding": 1}),
}
NARROW_LAYERS: dict[str, tuple[type[nn.Module], int, dict[str, Any]]] = {
    "3x3, dense": (nn.Conv2d, 8, {"kernel_size": 3, "padding": 1}),
    "3x3, 2 groups": (nn.Conv2d, 16, {"kernel_size": 3, "padding": 1, "groups": 2}),
    "1x1": (nn.Conv2d, 32, {"kernel_size": 1}),
    "transposed": (nn.ConvTranspose2d, 16, {"kernel_size": 3, "stride": 2}),
    "linear": (nn.Linear, 64, {}),
}
SCHEME = {"weights": "per_channel", "skip": []}


def prepared_network(
    net: nn.Module, method: str, backend: str, images: torch.Tensor, *, narrow: bool = False
) -> nn.Module:
    scheme = {"backend": backend, "inputs": stored_pictures(images.shape[1:]), "narrow_weights": narrow, **SCHEME}
    if method == "static":
        prepared: nn.Module = prepare_static(net, observer="min_max", calibrating=False, **scheme)
    else:
        options = {"batch_norm": "fold", "freeze_at": None, "learned_step_size": method == "learned"}
        prepared = prepare_qat(net, **options, **scheme).train()
    prepared(images)
    return prepared.eval()


@pytest.mark.parametrize("backend", supported_engines())
@pytest.mark.parametrize("method", ["static", "qat"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_largest_integers_do_not_overflow(name: str, method: str, backend: str) -> None:
    type_, channels, options = LAYERS[name]
    layer: Any = type_(**{"in_channels": channels, "out_channels": channels, "groups": channels, **options})
    generator = torch.Generator().manual_seed(7)
    signs = torch.randint(0, 2, layer.weight.shape[:1], generator=generator) * 2.0 - 1
    nn.init.zeros_(layer.bias)
    with torch.no_grad():
        layer.weight.copy_(signs.reshape(-1, *(1 for _ in layer.weight.shape[1:])).expand_as(layer.weight))
    images = torch.randint(0, 2, (2, channels, *(9 for _ in layer.weight.shape[2:])), generator=generator).float()
    images[0] = 1.0
    with quantized_engine(backend), torch.no_grad():
        prepared = prepared_network(nn.Sequential(layer), method, backend, images)
        reference, _ = reference_network(copy.deepcopy(prepared))
        converted = to_int8(prepared, backend=backend)
        difference = (converted(images) - reference(images)).abs().max()
        assert difference <= 1.01 * converted.get_submodule("0").scale


@pytest.mark.parametrize("backend", supported_engines())
@pytest.mark.parametrize("method", ["static", "qat"])
@pytest.mark.parametrize("name", NARROW_LAYERS)
def test_narrow_weights_do_not_overflow_on_any_processor(name: str, method: str, backend: str) -> None:
    type_, channels, options = NARROW_LAYERS[name]
    is_linear = type_ is nn.Linear
    sizes = dict.fromkeys(("in_features", "out_features") if is_linear else ("in_channels", "out_channels"), channels)
    layer: Any = type_(**sizes, **options)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(0)
    images = torch.ones(2, channels, *(() if is_linear else (9, 9)))
    images[1] = torch.randint(0, 2, images.shape[1:], generator=torch.Generator().manual_seed(7)).float()
    with quantized_engine(backend), torch.no_grad():
        prepared = prepared_network(nn.Sequential(layer), method, backend, images, narrow=True)
        reference, _ = reference_network(copy.deepcopy(prepared))
        converted = to_int8(prepared, backend=backend)
        assert largest_weights(converted) == {"0": 64}
        assert (converted(images) - reference(images)).abs().max() <= 1.01 * converted.get_submodule("0").scale


def largest_weights(int8: nn.Module) -> dict[str, int]:
    layers = {name: layer for name, layer in int8.named_modules() if has_int8_weights(layer)}
    return {name: int(layer._weight_bias()[0].int_repr().int().abs().max()) for name, layer in layers.items()}


class Gated(nn.Module):
    """Layers behind a layer, behind an operator of fixed range, and behind a batch norm that is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.two, self.three, self.four = nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.one(x)).relu()
        x = self.three(self.two(x.sigmoid())).relu()
        return self.four(x.mean((2, 3)))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("method", ["static", "qat", "learned"])
def test_narrow_weights_of_all_layers(method: str, narrow: bool) -> None:
    images = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(7))
    with torch.no_grad(), quantized_engine("qnnpack"):
        prepared = prepared_network(Gated(), method, "qnnpack", images, narrow=narrow)
        observers = [part for part in prepared.modules() if observes_activation_range(part)]
        assert {observer.quant_max for observer in observers} == {255}
        largest = largest_weights(to_int8(prepared, backend="qnnpack"))
    assert set(largest) == {"one", "two", "three", "four"}
    assert (max(largest.values()) <= 64, min(largest.values()) > 64) == (narrow, not narrow)


@pytest.mark.parametrize("batch_norm", ["fold", "train"])
def test_learned_ranges_of_seven_bits_clip_weights_as_they_were_trained(batch_norm: str) -> None:
    images = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(7))
    scheme = {**SCHEME, "backend": "qnnpack", "inputs": stored_pictures((3, 12, 12)), "narrow_weights": True}
    with torch.no_grad(), quantized_engine("qnnpack"):
        prepared: Any = prepare_qat(Gated(), batch_norm=batch_norm, freeze_at=None, learned_step_size=True, **scheme)
        prepared.train()(images)
        for name in ("one", "two", "four"):
            prepared.get_submodule(name).weight_fake_quant.log_part.fill_(math.log(0.6))
        expected = prepared.eval()(images)
        int8 = to_int8(prepared, backend="qnnpack")
        integers = {name: int8.get_submodule(name).weight().int_repr().int() for name in ("one", "two", "four")}
        for values in integers.values():
            assert values.abs().max() == 64
            assert (values.abs() == 64).sum() > values.shape[0]
        assert (int8(images) - expected).abs().max() < 0.05 * expected.std()


def test_former_recipes_of_seven_bit_activations_are_refused() -> None:
    scheme = {**SCHEME, "backend": "qnnpack", "inputs": stored_pictures((3, 12, 12))}
    options = {"observer": "min_max", "calibrating": True, **scheme}
    prepare_static(Gated(), reduce_range=False, **options)
    with pytest.raises(StageError, match="7-bit activations: quantize it again"):
        prepare_static(Gated(), reduce_range=True, **options)


def test_which_layers_get_narrow_weights() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 7, padding=3, groups=8),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.ConvTranspose2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 16, 5, groups=8),
    )
    graph = trace_network(net, pictures((1, 20, 20))).graph
    assert saturating_layers(graph, "fbgemm") == saturating_layers(graph, "x86") == ["1", "3", "6"]
    assert saturating_layers(graph, "qnnpack") == saturating_layers(graph, "onednn") == []
    scheme = {**SCHEME, "backend": "fbgemm", "inputs": stored_pictures((1, 20, 20)), "skip": ["6"]}
    for prepared in (
        prepare_static(net, observer="min_max", calibrating=False, **scheme),
        prepare_qat(net, batch_norm="fold", freeze_at=None, **scheme),
    ):
        qconfigs = {name: getattr(layer, "qconfig", None) for name, layer in prepared.named_children()}
        limits = {name: qconfigs[name].weight().quant_max for name in qconfigs if qconfigs[name] and name.isdigit()}
        assert limits.pop("1") == limits.pop("3") == 64
        assert "6" not in limits
        assert set(limits.values()) == {127}
