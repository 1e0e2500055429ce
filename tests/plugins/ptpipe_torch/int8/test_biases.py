"""Biases of int8 layers: one integer in every engine. Layers are compared with sums of 64-bit integers, exactly.

Shape legend: N images, C channels, H height, W width, O outputs of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_torch.int8 import fx
from ptpipe_torch.int8.biases import (
    MAX_BIAS,
    coarsening,
    exact_biases,
    integer_biases,
    quotients,
    sum_scales,
)
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.observers import static_qconfig

from ....processor import reduced
from ....signatures import pictures

SHAPE_CHW = (16, 9, 9)
IMAGES_NCHW = torch.randn(24, *SHAPE_CHW, generator=torch.Generator().manual_seed(1))
GRIDS = [(0.02, 0.004, 1.0), (0.7, 1e-5, 3e-4), (1e-3, 0.3, 40.0), (0.05, 0.05, 1e-7)]
"""Scale of the input, of the weights, size of the biases."""


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("input_scale", "weight_scale", "size"), GRIDS)
def test_all_engines_get_the_same_integers(input_scale, weight_scale, size, per_channel) -> None:
    rng = np.random.default_rng(0)
    bias_O = (rng.normal(size=5000) * size).astype(np.float32)
    scales = sum_scales(input_scale, rng.uniform(0.5, 2, 5000 if per_channel else ()) * weight_scale)
    exact_O = exact_biases(bias_O, scales)
    integers_O = integer_biases(exact_O, scales)
    added_O = quotients(exact_O, scales)
    is_large_O = np.abs(integers_O) >= 5000
    assert (added_O == integers_O)[is_large_O].sum() >= 0.99 * is_large_O.sum()
    np.testing.assert_allclose(added_O, integers_O, rtol=1.2e-7)
    moved_O = np.abs(integers_O - bias_O.astype(np.float64) / scales)
    assert moved_O.max() < 8.51
    assert moved_O[np.abs(integers_O) < 4000].max(initial=0) < 0.51
    assert moved_O.mean() < 0.6
    np.testing.assert_array_equal(exact_biases(exact_O, scales), exact_O)


def test_integers_are_what_float64_gives() -> None:
    rng = np.random.default_rng(0)
    bias_O, scales_O = rng.normal(size=5000).astype(np.float32), rng.uniform(1e-5, 1e-4, 5000).astype(np.float32)
    quotient_O = bias_O.astype(np.float64) / scales_O
    is_tie_O = np.abs(quotient_O - np.floor(quotient_O) - 0.5) < 0.01
    integers_O = integer_biases(bias_O, scales_O)
    np.testing.assert_array_equal(integers_O[~is_tie_O], np.rint(quotient_O[~is_tie_O]))
    assert np.abs(integers_O - quotient_O).max() < 0.51


def test_a_bias_of_zero_stays_and_one_beyond_float32s_integers_is_found() -> None:
    scales_O = np.array([3e-7, 1e-7, 1e-7], np.float32)
    bias_O = np.array([0, -7, 60], np.float32)
    exact_O = exact_biases(bias_O, scales_O)
    assert exact_O[0] == 0
    np.testing.assert_array_equal(exact_O / scales_O, integer_biases(exact_O, scales_O).astype(np.float32))
    np.testing.assert_allclose(exact_O, bias_O, rtol=1e-6)


def test_weights_get_coarser_where_their_bias_would_not_fit() -> None:
    scales_O = np.array([1e-3, 1e-9, 1e-12, 2.0**-30], np.float32)
    bias_O = np.array([5, 2, -30, 1], np.float32)
    factors_O = coarsening(bias_O, scales_O)
    assert factors_O.dtype == np.float32
    np.testing.assert_array_equal(factors_O, [1, 2, 32768, 1])
    assert np.abs(bias_O / (scales_O * factors_O)).max() <= MAX_BIAS
    np.testing.assert_array_equal(coarsening(bias_O, scales_O * factors_O), np.ones(4))
    assert coarsening(bias_O, scales_O[2]) == 32768
    assert coarsening(bias_O, scales_O[0]) == 1


def convolution(**options: Any) -> nn.Module:
    return nn.Conv2d(16, **{"out_channels": 16, "kernel_size": 3, "padding": 1, **options})


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(convolution(out_channels=24)),
    "pointwise": lambda: nn.Sequential(convolution(out_channels=40, kernel_size=1, padding=0)),
    "strided": lambda: nn.Sequential(convolution(stride=2, kernel_size=5)),
    "depthwise": lambda: nn.Sequential(convolution(groups=16)),
    "large depthwise": lambda: nn.Sequential(convolution(groups=16, kernel_size=5, padding=2)),
    "grouped": lambda: nn.Sequential(convolution(groups=4)),
    "conv, relu": lambda: nn.Sequential(convolution(), nn.ReLU()),
    "depthwise, relu": lambda: nn.Sequential(convolution(groups=16), nn.ReLU()),
    "conv, batch norm": lambda: nn.Sequential(convolution(bias=False), nn.BatchNorm2d(16)),
    "conv, batch norm, relu": lambda: nn.Sequential(convolution(), nn.BatchNorm2d(16), nn.ReLU()),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16 * 81, 33)),
    "linear, relu": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(81, 20), nn.ReLU()),
    "behind dropout": lambda: nn.Sequential(nn.Dropout(), convolution()),
}


def prepared(network: nn.Module, *, per_channel: bool, narrow: bool = False) -> GraphModule:
    """A calibrated network with biases as large as its sums, and batch norms that change something.

    `narrow`: for depthwise convolutions, whose sums would saturate on fbgemm.
    """
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
        if getattr(layer, "bias", None) is not None:
            nn.init.normal_(layer.bias)
    graph, scopes = fx.trace(network.eval(), pictures(SHAPE_CHW))
    qconfig = static_qconfig("min_max", per_channel=per_channel, narrow_weights=narrow)
    mapping = fx.qconfig_mapping("fbgemm", qconfig, qconfig, is_qat=False)
    with torch.no_grad():
        result = fx.add_observers(graph, scopes, mapping, is_qat=False)
        result(IMAGES_NCHW)
    return result


def expected_integers(layer: Any, x: torch.Tensor, backend: str) -> np.ndarray:
    """Return what an int8 layer is to compute, from sums of int64 and one float32 multiplication.

    fbgemm divides by the output's scale, as ONNX Runtime does; qnnpack multiplies by its reciprocal.
    """
    weight, bias_O = layer.weight(), layer.bias().detach().numpy()
    per_channel = weight.qscheme() is not torch.per_tensor_affine
    weight_scales = weight.q_per_channel_scales().numpy() if per_channel else np.array(weight.q_scale())
    scales = sum_scales(x.q_scale(), weight_scales)
    values, weights = x.int_repr().double() - x.q_zero_point(), weight.int_repr().double()
    if isinstance(layer, torch.ao.nn.quantized.Linear):
        sums, shape = nn.functional.linear(values, weights), (-1,)
    else:
        sums = nn.functional.conv2d(values, weights, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        shape = (-1, 1, 1)
    integers = sums.numpy().astype(np.int64) + integer_biases(bias_O, scales).reshape(shape)
    output_scale = np.float32(layer.scale)
    factors = scales / output_scale if backend == "fbgemm" else scales * (np.float32(1) / output_scale)
    multiplier = np.broadcast_to(factors, bias_O.shape).reshape(shape)
    rounded = np.rint(integers.astype(np.float32) * multiplier) + layer.zero_point
    return np.clip(rounded, layer.zero_point if "ReLU" in type(layer).__name__ else 0, 255)


def single_layer(int8: GraphModule) -> Any:
    (layer,) = (module for module in int8.modules() if has_int8_weights(module))
    return layer


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_an_int8_layer_adds_the_integers_that_a_file_stores(name: str, per_channel: bool, backend: str) -> None:
    torch.manual_seed(3)
    network = prepared(LAYERS[name](), per_channel=per_channel, narrow="depthwise" in name or reduced(backend))
    with quantized_engine(backend), torch.no_grad(), deprecations_silenced():
        int8 = fx.convert(network)
        layer, calls = single_layer(int8), []
        layer.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
        int8(IMAGES_NCHW)
    ((x, y),) = calls
    expected = expected_integers(layer, x, backend)
    np.testing.assert_array_equal(y.int_repr().numpy(), expected)
    assert len(np.unique(expected)) > 100


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_a_channel_with_next_to_no_weights_keeps_its_bias(per_channel: bool, backend: str) -> None:
    torch.manual_seed(3)
    network = convolution(groups=1)
    with torch.no_grad():
        network.weight[2 if per_channel else slice(None)] *= 1e-12
    network = prepared(nn.Sequential(network), per_channel=per_channel)
    with torch.no_grad():
        network.get_submodule("0").bias[2] = 300.0
        network(IMAGES_NCHW)
        expected = network(IMAGES_NCHW)[:, 2]
    with quantized_engine(backend), torch.no_grad(), deprecations_silenced():
        int8 = fx.convert(network)
        found = int8(IMAGES_NCHW)[:, 2]
    layer = single_layer(int8)
    assert (found - expected).abs().max() <= 0.51 * layer.scale
    (quantize,) = int8.graph.find_nodes(op="call_function", target=torch.quantize_per_tensor)
    weight, input_scale = layer.weight(), int8.get_buffer(str(quantize.args[1].target)).item()
    scale = weight.q_per_channel_scales()[2].item() if per_channel else weight.q_scale()
    assert MAX_BIAS / 2 < 300 / (scale * input_scale) <= MAX_BIAS


class Twice(nn.Module):
    """Calls one layer with inputs of two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = convolution()

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.layer(10 * self.layer(images_NCHW))


def test_a_layer_that_is_called_on_two_grids_keeps_its_bias() -> None:
    torch.manual_seed(3)
    network = prepared(Twice(), per_channel=True)
    bias_O = network.get_submodule("layer").bias.detach().clone()
    with quantized_engine("fbgemm"):
        int8 = fx.convert(network)
    assert torch.equal(int8.get_submodule("layer").bias(), bias_O)


def test_the_parameters_of_an_int8_network_replace_those_of_its_reference() -> None:
    torch.manual_seed(3)
    network = prepared(nn.Sequential(convolution(), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 5)), per_channel=True)
    with quantized_engine("fbgemm"):
        before = network.get_submodule("0.0").bias.detach().clone()
        int8 = fx.convert(copy.deepcopy(network))
        reference, weights = fx.reference_network(network, int8)
        layers = {name: part for name, part in int8.named_modules() if has_int8_weights(part)}
        assert weights.keys() == {"0.0.weight", "3.weight"}
        for name, path in (("0", "0.0"), ("3", "3")):
            own = reference.get_submodule(path)
            assert torch.equal(own.bias, layers[name].bias())
            assert torch.equal(own.weight, layers[name].weight().dequantize())
            np.testing.assert_array_equal(weights[f"{path}.weight"].integers, layers[name].weight().int_repr())
    assert not torch.equal(before, reference.get_submodule("0.0").bias)


def test_weights_from_an_int8_network_are_contiguous() -> None:
    """Exporters take another layout for channels last, and write other operators behind it."""
    network = prepared(nn.Sequential(convolution(kernel_size=1, padding=0), nn.ReLU(), convolution()), per_channel=True)
    with quantized_engine("fbgemm"):
        reference, _ = fx.reference_network(network, fx.convert(copy.deepcopy(network)))
    for path in ("0.0", "2"):
        weight = reference.get_submodule(path).weight
        assert weight.stride() == torch.empty(weight.shape).stride(), "also where it is contiguous both ways"
