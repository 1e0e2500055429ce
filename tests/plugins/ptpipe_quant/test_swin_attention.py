"""torchvision's Swin and Swin v2: window attention as layers and products.

Shape legend: N images, C channels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    DynamicConfig,
    PrepareConfig,
    calibrate,
    convert,
    dynamic,
    prepare,
)
from ptpipe_quant.trace import float_names, trace_network
from ptpipe_torch import Data, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.layers import DynamicLinear
from ptpipe_torch.torchvision_compat import torchvision

from ...signatures import pictures
from .conftest import BACKENDS, NUM_CLASSES, make_model

TARGETS = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]


@builder
def swin(*, version: int, window: int) -> nn.Module:
    """A Swin of two blocks on patches of 2x2 pixels, the second with shifted windows, for gray images."""
    torchvision()
    from torchvision.models import swin_transformer

    parts: Any = {"block": swin_transformer.SwinTransformerBlockV2} if version == 2 else {}
    sizes: Any = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": [window] * 2}
    network = swin_transformer.SwinTransformer(**sizes, attention_dropout=0.1, num_classes=NUM_CLASSES, **parts)
    for name, parameter in network.named_parameters():
        if "bias" in name:  # torchvision's are almost zero
            nn.init.normal_(parameter, std=0.5)
    return nn.Sequential(nn.Conv2d(1, 3, 1), network)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("size", "window"), [(8, 2), (10, 3), (4, 2), (8, 4), (12, 4)])  # padded; one window only
def test_the_function_is_torchvisions(version: int, size: int, window: int) -> None:
    torch.manual_seed(0)
    network, x = swin(version=version, window=window).eval(), torch.randn(3, 1, size, size)
    expected = network(x)
    graph = trace_network(network, pictures((1, size, size))).graph
    assert not [node for node in graph.graph.nodes if "shifted_window_attention" in str(node.target)]
    assert {name for name, _ in graph.named_modules() if name.endswith((".qkv", ".proj"))} == {
        f"1.features.1.{block}.attn.{layer}" for block in (0, 1) for layer in ("qkv", "proj")
    }
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)


def test_what_is_skipped_stays_whole() -> None:
    network = swin(version=1, window=2).eval()
    traced = trace_network(network, pictures((1, 8, 8)), float_names(network, ["*.1.1.attn"]))
    assert traced.float_names == ["1.features.1.1.attn"]
    assert type(traced.graph.get_submodule("1.features.1.1.attn")).__module__.startswith("torchvision")


@pytest.mark.parametrize(("backend", "version"), [(TARGETS[0], 1), (TARGETS[-1], 2)])
def test_dynamic(backend: str, version: int, digits: Data, ctx: Context, metrics: Any) -> None:
    float_model = make_model(swin, version=version, window=2)
    int8 = dynamic(DynamicConfig(backend=backend, skip=["*.1.1.attn.proj"]), ctx, float_model)
    layers = {name for name, layer in int8.build().named_modules() if isinstance(layer, DynamicLinear)}
    assert {name for name in layers if name.endswith((".qkv", ".proj"))} == {
        f"1.features.1.{name}" for name in ("0.attn.qkv", "0.attn.proj", "1.attn.qkv")
    }
    export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)
    assert metrics()["top1_agreement"] == 1
    num_linears = {1: 9, 2: 13}[version]  # those that compute version 2's bias of positions are constants of the file
    assert f"8 of {num_linears} linear layers" in metrics()["integer_coverage"]


@pytest.mark.thorough
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("backend", TARGETS)
def test_int8(backend: str, version: int, digits: Data, ctx: Context, metrics: Any) -> None:
    prepared = prepare(PrepareConfig(backend=backend), ctx, make_model(swin, version=version, window=2))
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(num_samples=64), ctx, prepared, digits).model)
    with quantized_engine(backend):
        network: Any = int8.build()
    assert len(network.graph.find_nodes(op="call_function", target=torch.ops.quantized.matmul)) == 4
    # What computes the bias of positions, which is a constant, stays float.
    assert all("cpb_mlp" in part or "(Parameter)" in part for part in metrics()["float_layers"])
    export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)
    assert "9 of 9 linear layers, 4 of 4 matrix products" in metrics()["integer_coverage"]
