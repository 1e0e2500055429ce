"""Functions with weights of their own: which become layers, under which name, and which stay float, and why."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe.events import Event, LogLine, Notice
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    DynamicConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    dynamic,
    prepare,
    prepare_qat,
)
from ptpipe_quant.trace import float_names, trace_network
from ptpipe_torch import ArrayColumn, Data, FunctionRef, Model, Recipe, builder
from ptpipe_torch.int8.layers import has_int8_weights

from ...datasets import image_info, image_split
from ...processor import needs_fbgemm_fault
from ...signatures import classifier, pictures
from . import functional
from .conftest import BACKENDS, train
from .functional import BECOME_LAYERS, STAY_FLOAT, linear_net, net, of_map, weight
from .spellings import INPUT_SHAPE_CHW

WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)


def graph_of(network: nn.Module, *leaves: str) -> Any:
    return trace_network(copy.deepcopy(network), pictures(INPUT_SHAPE_CHW), leaves)


def images() -> torch.Tensor:
    return torch.randn(4, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", BECOME_LAYERS)
def test_functions_become_layers(name) -> None:
    network, names = functional.build(name), BECOME_LAYERS[name][1]
    traced = graph_of(network)
    graph = traced.graph
    layers = {path for path, layer in graph.named_modules() if isinstance(layer, WEIGHTED)}
    assert (layers - {"stem", "fc"}, traced.kept_float) == (set(names), {})
    assert not graph.graph.find_nodes(op="get_attr")
    with torch.no_grad():  # a transposed copy of a weight may be summed in another order
        torch.testing.assert_close(graph(images()), network(images()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", STAY_FLOAT)
def test_others_stay_as_they_are_and_are_named_with_their_line(name) -> None:
    network, reason = functional.build(name), STAY_FLOAT[name][1]
    traced = graph_of(network)
    ((line, found),) = traced.kept_float.items()
    assert reason in found
    assert "functional.py:" in line
    with torch.no_grad():
        assert torch.equal(traced.graph(images()), network(images()))


def test_training_moves_the_same_weights() -> None:
    """Gradients of the layers are those of the parameters, slice by slice."""
    network = functional.build("packed")
    graph = graph_of(network).graph
    for module in (network, graph):
        F.cross_entropy(module(images()), torch.arange(4)).backward()
    slices = [graph.get_parameter(f"packed_{number}.weight").grad for number in range(3)]
    torch.testing.assert_close(torch.cat(slices), network.packed.grad)
    torch.testing.assert_close(graph.get_parameter("packed_0.bias").grad, network.packed_bias.grad)
    assert sum(p.numel() for p in graph.parameters()) < sum(p.numel() for p in network.parameters())  # without `conv`


def test_a_weight_that_is_not_trained_stays_so() -> None:
    network = net(of_map(lambda n, x: F.conv2d(x, n.kernel, groups=8)))
    network.register_buffer("kernel", torch.rand(8, 1, 3, 3))
    assert not graph_of(network).graph.get_parameter("kernel.weight").requires_grad


def test_skip_takes_the_name_of_a_weight() -> None:
    network = linear_net(lambda n, x: F.linear(x, n.w), w=weight(8, 8))
    assert float_names(network, ["w"]) == ["w"]
    assert set(float_names(network, ["Parameter"])) == {"w", "head", "head_bias"}
    graph = graph_of(network, "w").graph
    assert "w" in dict(graph.named_parameters())
    assert type(graph.head) is nn.Linear
    with pytest.raises(StageError, match="did you mean 'head_bias'"):
        float_names(network, ["head_bia"])


@builder
def functions(*, name: str) -> nn.Module:
    """A network of `functional`; one with many of its forms; one that fbgemm gets wrong."""
    if name in functional.NETWORKS:
        return functional.build(name)
    torch.manual_seed(0)
    if name == "doubled":
        return net(of_map(lambda n, x: F.conv_transpose2d(x, n.w, None, 2, 0, 1)), w=weight(8, 8, 2, 2))
    maps = of_map(lambda n, x: F.conv_transpose2d(F.relu(F.conv2d(x, n.w, n.b, padding=1)), n.up, None, 2, 1))
    return net(
        lambda n, x: maps(n, x) + functional.of_rows(functional.attention)(n, x),
        w=weight(8, 8, 3, 3),
        b=weight(8),
        up=weight(8, 8, 3, 3),
        packed=weight(24, 8),
        packed_bias=weight(8),
        head=weight(5, 8),
        head_bias=weight(5),
    )


def model_of(name: str) -> Model:
    return Model.from_module(
        Recipe(FunctionRef.to(functions, name=name), classifier(INPUT_SHAPE_CHW, 5)), functions(name=name)
    )


@pytest.fixture(scope="module")
def noise() -> Data:
    """Random pixels of five classes, each with a mean of its own."""
    info = image_info("noise", tuple("abcde"), INPUT_SHAPE_CHW, (0.4,) * 3, (0.25,) * 3)
    random, splits = np.random.default_rng(0), {}
    for name in ("train", "calibration", "test"):
        labels_N = np.arange(96) % 5
        pixels_NHWC = random.integers(0, 90, (96, 12, 12, 3)) + 33 * labels_N[:, None, None, None]
        ids = np.array([f"{name}/{number:03}" for number in range(96)])
        splits[name] = image_split(ids, labels_N.astype(np.int64), ArrayColumn(pixels_NHWC.astype(np.uint8)))
    return Data(info, splits)


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize(
    ("backend", "is_qat"), [("fbgemm", False), ("fbgemm", True), ("qnnpack", True), ("qnnpack", False)]
)
def test_int8_and_its_file(backend, is_qat, noise, ctx, metrics) -> None:
    if backend not in BACKENDS:
        pytest.skip(f"no {backend} here")
    model = model_of("many")
    if is_qat:
        prepared = prepare_qat(PrepareQatConfig(backend=backend), ctx, model)
        trained = train(prepared, noise, lr=0.01)
        before, after = (dict(of.build_prepared().named_parameters()) for of in (prepared, trained))
        assert not torch.equal(before["packed_2.weight"], after["packed_2.weight"])
    else:
        trained = calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(backend=backend), ctx, model), noise).model
    converted = convert(ConvertConfig(), ctx, trained)
    int8 = {name for name, layer in converted.build().named_modules() if has_int8_weights(layer)}
    assert {"w", "packed_0", "packed_1", "packed_2", "head", "stem", "fc"} <= int8
    export_onnx(ExportConfig(num_samples=32), ctx, converted, noise)  # with its parity checks
    coverage = metrics()["integer_coverage"]
    assert coverage.startswith("3 of 3 convolutions")
    assert coverage.endswith("5 of 5 linear layers, 2 of 2 matrix products")


def texts(events: list[Event], type_: type[LogLine | Notice]) -> str:
    return " ".join(event.text for event in events if isinstance(event, type_))


def test_what_stays_float_is_reported(ctx, events) -> None:
    prepare(PrepareConfig(), ctx, model_of("penalized"))
    assert "` stays float: w is used by something else as well" in texts(events, LogLine)
    assert "functional.py:" in texts(events, LogLine)
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert re.fullmatch(r"1 layer stays float \(\S*functional\.py:.*: w is used by something else as well\)", notice)


@needs_fbgemm_fault
def test_a_transposed_convolution_that_the_engine_gets_wrong_stays_float(ctx, events, noise) -> None:
    """fbgemm computes 2x2 kernels with stride 2 wrongly; with output padding no other form is used."""
    prepared = prepare(PrepareConfig(backend="fbgemm"), ctx, model_of("doubled"))
    assert "w stays float: fbgemm's transposed convolution" in texts(events, Notice)
    convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, noise).model)


def test_quant_dynamic_takes_patterns_of_weights(ctx) -> None:
    with pytest.raises(StageError, match="no layer of this network can be quantized"):
        dynamic(DynamicConfig(skip=["w", "fc", "stem", "conv"]), ctx, model_of("conv2d"))
