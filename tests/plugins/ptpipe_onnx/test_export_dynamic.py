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

from ptpipe import Context, StageError
from ptpipe_onnx.kernels import Kernels
from ptpipe_quant import DynamicConfig, dynamic
from ptpipe_torch import FunctionRef, Model, OnnxFile, Recipe, builder, transform
from ptpipe_torch.int8.int8_state import pack_state
from ptpipe_torch.int8.layers import dynamic_weights, round_weights, swap_dynamic_linears

from ...signatures import classifier

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]


@builder
def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))


class TwoNames(nn.Module):
    """A layer and a block that have two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.block, self.head = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16)), nn.Linear(256, 10)
        self.same_rows, self.same_block = self.rows, self.block

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x_NHC = self.same_rows(self.rows(images_NCHW.squeeze(1)).relu())
        return self.head(self.same_block(self.block(x_NHC).relu()).flatten(1))


class TiedLinears(nn.Module):
    """Two layers share a weight, which the network uses once more itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(256, 10)
        self.second.weight = self.matrix = self.first.weight

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x_NHC = self.second(self.first(images_NCHW.squeeze(1)).relu()).relu()
        return self.head((x_NHC @ self.matrix).flatten(1))


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 16), nn.Linear(16, 10)
        self.head.weight = self.embedding.weight

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(images_NCHW[:, 0, :, 7].abs().long()).sum(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(images_NCHW.squeeze(1)).flatten(1))


class ViewBehindConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 14 * 14, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x_NCHW = self.conv(images_NCHW)
        return self.head(x_NCHW.view(x_NCHW.size(0), -1))


class Unread(nn.Module):
    """The last block's remainder, as in N-BEATS, and a head that only training calls: nothing reads their results."""

    def __init__(self) -> None:
        super().__init__()
        self.backcasts = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.heads, self.auxiliary = nn.ModuleList(nn.Linear(256, 10) for _ in range(2)), nn.Linear(256, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x_ND, scores_NK = images_NCHW.flatten(1), torch.zeros(10)
        for backcast, head in zip(self.backcasts, self.heads, strict=True):
            scores_NK = scores_NK + head(x_ND)
            x_ND = x_ND - backcast(x_ND)
        return scores_NK


class Transposed(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(256, 16) / 16), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 256), self.weight).view(*x.shape[:-1], 16)


@builder
def transposed_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Transposed(), nn.ReLU(), nn.Linear(16, 10))


_UNUSUAL = {
    TwoNames: ["block.0", "head", "rows", "same_block.0", "same_rows"],
    TiedLinears: ["first", "head", "second"],
    TiedEmbedding: ["head"],
    Encoder: ["encoder.linear1", "encoder.linear2", "head"],
    ViewBehindConvolution: ["head"],
    Unread: ["auxiliary", "backcasts.0", "backcasts.1", "heads.0", "heads.1"],
}


@builder
def unusual(name: str) -> nn.Module:
    return next(type_ for type_ in _UNUSUAL if type_.__name__ == name)()


@transform
def with_dynamic_layers(module: nn.Module, layers: list[str]) -> nn.Module:
    with torch.no_grad():
        return swap_dynamic_linears(module, layers, per_channel=True, narrow_weights=False)


@builder
def convolutions(transposed: bool) -> nn.Module:
    up = nn.ConvTranspose2d(4, 6, 3) if transposed else nn.Conv2d(4, 6, 3)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), up, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 10, 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


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
    assert len(expected) == (5 if name == "rows" else 2)
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
    recipe = Recipe(
        FunctionRef.to(one_layer), classifier((1, 16, 16), 10), (), (FunctionRef.to(quantized_everywhere),), "qnnpack"
    )
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


@pytest.mark.parametrize("type_", _UNUSUAL)
def test_shared_weights_and_names(type_, run_export: Export) -> None:
    convert = FunctionRef.to(with_dynamic_layers, layers=_UNUSUAL[type_])
    recipe = Recipe(
        FunctionRef.to(unusual, name=type_.__name__), classifier((1, 16, 16), 10), (), (convert,), "qnnpack"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        file = run_export(Model.from_module(recipe, unusual(type_.__name__)))
    nodes = Counter(node.op_type for node in onnx.load(file.path).graph.node)
    num_products = {TwoNames: 5, TiedEmbedding: 1, ViewBehindConvolution: 1}.get(type_, 3)
    assert nodes["MatMulInteger"] == num_products
    assert nodes["DynamicQuantizeLinear"] == (2 if type_ is Unread else num_products)  # two layers of it read the same
    num_float = sum(array.size for array in arrays_of(file).values() if array.ndim == 2 and array.dtype == np.float32)
    shared = {TiedLinears: 16 * 16, TiedEmbedding: 10 * 16, Encoder: 16 * 4 * 16}.get(type_, 0)  # attention is float
    assert num_float == shared


def test_a_transposed_weight(run_export: Export, tmp_path: Path) -> None:
    torch.manual_seed(1)
    recipe = Recipe(FunctionRef.to(transposed_layer), classifier((1, 16, 16), 10))
    model = Model.from_module(recipe, transposed_layer())
    ctx = Context("int8", "quant.dynamic", 7, tmp_path)
    file = run_export(dynamic(DynamicConfig(backend="qnnpack"), ctx, model))
    assert Counter(node.op_type for node in onnx.load(file.path).graph.node)["MatMulInteger"] == 2
    assert {name: array.dtype for name, array in arrays_of(file).items() if array.ndim == 2} == {
        "1.weight": np.int8, "3.weight": np.int8,
    }  # fmt: skip


@pytest.mark.parametrize(("backend", "transposed"), [("fbgemm", False), ("fbgemm", True), ("qnnpack", True)])
def test_a_network_of_convolutions(backend: str, transposed: bool, run_export: Export, tmp_path: Path) -> None:
    builder_ = FunctionRef.to(convolutions, transposed=transposed)
    recipe = Recipe(builder_, classifier((1, 16, 16), 10), (), (FunctionRef.to(as_it_is),), backend)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = convolutions(transposed).eval()
        for layer in module:
            if isinstance(layer, nn.BatchNorm2d):  # otherwise there is nothing to fold
                layer.running_var.uniform_(0.5, 2)
                layer.running_mean.normal_()
    packed = round_weights(module, ["0", "3", "6"], per_channel=backend != "qnnpack")
    model = Model.from_module(recipe, module)
    state = {name: tensor for name, tensor in module.state_dict().items() if name not in packed}
    file = run_export(Model(recipe, model.tensors, pack_state({**state, **packed})))
    assert file.format == "onnx int8 dynamic"
    assert file.parity["max_abs_logit_difference"] < 1e-4
    arrays = arrays_of(file)
    for name, weight in packed.items():
        np.testing.assert_array_equal(arrays[f"{name}.int8"], weight.int_repr().numpy())
    assert not [
        name for name, array in arrays.items() if array.ndim == 4 and array.size > 10 and array.dtype != np.int8
    ]


def test_layers_that_have_no_such_form_are_named(run_export: Export) -> None:
    recipe = Recipe(
        FunctionRef.to(recurrent), classifier((1, 16, 16), 10), (), (FunctionRef.to(quantized_everywhere),), "qnnpack"
    )
    with pytest.raises(StageError, match=r"^1 \(LSTM\) can't be exported as dynamic int8: leave it float"):
        run_export(Model.from_module(recipe, recurrent()))


def test_a_model_without_a_quantized_layer(run_export: Export, float_model: Make) -> None:
    model = float_model("cnn").with_recipe(convert=(FunctionRef.to(as_it_is),), backend="fbgemm")
    with pytest.raises(StageError, match="no layer of this fbgemm model is quantized"):
        run_export(model)


@transform
def as_it_is(module: nn.Module) -> nn.Module:
    return module
