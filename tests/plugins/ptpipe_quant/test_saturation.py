"""Depthwise convolutions at the largest integers: int8 equals the reference network, static and QAT."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_quant.saturation import saturating_layers
from ptpipe_quant.trace import trace_network
from ptpipe_quant.transforms import prepare_qat, prepare_static, to_int8
from ptpipe_torch.int8.engine import quantized_engine, supported_engines
from ptpipe_torch.int8.fx import reference_network

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
SCHEME = {"weights": "per_channel", "reduce_range": False, "skip": []}


def prepared_network(net: nn.Module, method: str, backend: str, images: torch.Tensor) -> nn.Module:
    scheme = {"backend": backend, "inputs": stored_pictures(images.shape[1:]), **SCHEME}
    if method == "static":
        prepared: nn.Module = prepare_static(net, observer="min_max", calibrating=False, **scheme)
    else:
        prepared = prepare_qat(net, batch_norm="fold", freeze_at=None, **scheme).train()
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
