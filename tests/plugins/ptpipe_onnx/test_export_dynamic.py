"""Dynamically quantized models.

Shape legend: N samples, B of a batch, C channels, H height, W width, D inputs of a layer, K classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from ptpipe import StageError
from ptpipe_onnx.kernels import Kernels
from ptpipe_torch import FunctionRef, Model, OnnxFile, Recipe, builder, transform
from ptpipe_torch.int8.layers import dynamic_weights

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]


@builder
def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))


@builder
def recurrent() -> nn.Module:
    return nn.Sequential(nn.Flatten(2), nn.LSTM(256, 10))


@transform
def quantized_everywhere(module: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(module, {nn.Linear, nn.LSTM})


def arrays_of(file: OnnxFile) -> dict[str, np.ndarray]:
    return {array.name: numpy_helper.to_array(array) for array in onnx.load(file.path).graph.initializer}


@pytest.mark.parametrize(
    ("name", "backend", "per_channel"),
    [("cnn", "fbgemm", False), ("cnn", "qnnpack", True), ("rows", "onednn", True), ("rows", "qnnpack", False)],
)
def test_linear_layers_multiply_integers(
    name: str, backend: str, per_channel: bool, run_export: Export, dynamic_model: Make, events, tmp_path: Path
) -> None:
    model = dynamic_model(name, backend, per_channel=per_channel)
    file = run_export(model)
    assert file.format == "onnx int8 dynamic"
    assert file.parity["top1_agreement"] >= 0.98
    assert "max_logit_difference_steps" not in file.parity
    if backend == "qnnpack":  # 8 bits of the input in both: what differs are ties
        assert file.parity["rms_logit_difference"] < 0.3 * file.parity["rms_quantization_error"]

    expected = dynamic_weights(model.build())
    arrays = arrays_of(file)
    assert len(expected) == (3 if name == "rows" else 2)
    for weight_name, weight in expected.items():
        np.testing.assert_array_equal(arrays[weight_name], weight.integers.T)
        assert arrays[weight_name].dtype == np.int8
        np.testing.assert_array_equal(arrays[f"{weight_name}.scale"], weight.scales)
        assert weight.per_channel == per_channel
    types = Counter(node.op_type for node in onnx.load(file.path).graph.node)
    assert types["MatMulInteger"] == types["DynamicQuantizeLinear"] == len(expected)
    assert types["Gemm"] == types["MatMul"] == 0
    assert Kernels.of(file.path, tmp_path).integer["DynamicQuantizeMatMul"] == len(expected)
    assert events.metrics["num_int8_nodes"] == len(expected)


def test_the_arithmetic_is_that_of_the_onnx_specification(
    run_export: Export, run_onnx: Callable[..., np.ndarray]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = one_layer()
    recipe = Recipe(FunctionRef.to(one_layer), (1, 16, 16), 10, (), (FunctionRef.to(quantized_everywhere),), "qnnpack")
    file = run_export(Model.from_module(recipe, module))
    images_NCHW = np.random.default_rng(6).normal(size=(9, 1, 16, 16)).astype(np.float32)

    x_ND = images_NCHW.reshape(9, 256)
    scale = (np.maximum(x_ND.max(), 0) - np.minimum(x_ND.min(), 0)) / np.float32(255)
    zero_point = np.clip(np.rint(-np.minimum(x_ND.min(), 0) / scale), 0, 255)
    integers_ND = np.clip(np.rint(x_ND / scale) + zero_point, 0, 255).astype(np.int64)
    arrays = arrays_of(file)
    (weight_DK, weight_scale) = arrays["1.weight"].astype(np.int64), arrays["1.weight.scale"]
    expected_NK = ((integers_ND - int(zero_point)) @ weight_DK) * (scale * weight_scale) + module[
        1
    ].bias.detach().numpy()

    found_NK = run_onnx(file.path, images_NCHW, optimize=True)
    np.testing.assert_allclose(found_NK, expected_NK, atol=1e-5 * np.abs(expected_NK).max())


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.fc(x.view(x.size(0), -1))


@builder
def viewing() -> nn.Module:
    return Viewing()


@transform
def quantized_linears(module: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(module, {nn.Linear})


def test_a_view_behind_a_convolution(run_export: Export) -> None:
    """Of its three networks, torch's and the float one are to run in channels-last where they can."""
    recipe = Recipe(FunctionRef.to(viewing), (1, 16, 16), 10, (), (FunctionRef.to(quantized_linears),), "fbgemm")
    assert run_export(Model.from_module(recipe, viewing())).precision == "int8 dynamic"


def test_layers_that_have_no_such_form_are_named(run_export: Export) -> None:
    recipe = Recipe(FunctionRef.to(recurrent), (1, 16, 16), 10, (), (FunctionRef.to(quantized_everywhere),), "qnnpack")
    with pytest.raises(StageError, match=r"^1 \(LSTM\) can't be exported as dynamic int8: leave it float"):
        run_export(Model.from_module(recipe, recurrent()))


def test_a_model_without_a_quantized_layer(run_export: Export, float_model: Make) -> None:
    model = float_model("cnn").with_recipe(convert=(FunctionRef.to(as_it_is),), backend="fbgemm")
    with pytest.raises(StageError, match="no layer of this fbgemm model is quantized"):
        run_export(model)


@transform
def as_it_is(module: nn.Module) -> nn.Module:
    return module
