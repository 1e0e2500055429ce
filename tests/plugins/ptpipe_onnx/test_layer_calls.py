"""Int8 files of networks that call one layer several times, and of transposed convolutions.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from ptpipe import Context, StageError
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.kernels import Kernels
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, PrepareConfig, PrepareQatConfig
from ptpipe_torch import Data, FunctionRef, Model, OnnxFile, Recipe
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.model.function_ref import builder
from ptpipe_torch.runtime import seeded

from ...processor import is_fbgemm_right
from ...signatures import classifier

SHAPE_CHW = (1, 16, 16)
FORMS = [(is_qat, backend) for is_qat in (False, True) for backend in ("fbgemm", "qnnpack")]


class Repeated(nn.Module):
    """One layer, called several times; ReLU behind all calls or behind the first one alone."""

    def __init__(self, layer: nn.Module, num_calls: int, always_relu: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, 2, 1)
        self.layer = layer
        self.head = nn.Linear(12, 10)
        self.num_calls, self.always_relu = num_calls, always_relu

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.stem(images_NCHW)
        x = x.flatten(1).reshape(-1, 64, 12) if isinstance(self.layer, nn.Linear) else x
        for call in range(self.num_calls):
            x = self.layer(x)
            x = torch.relu(x) if self.always_relu or not call else x
        return self.head(x.mean(1) if isinstance(self.layer, nn.Linear) else x.mean((2, 3)))


@builder
def repeated(is_linear: bool, num_calls: int, always_relu: bool) -> nn.Module:
    layer = nn.Linear(12, 12) if is_linear else nn.Conv2d(12, 12, 3, padding=1)
    return Repeated(layer, num_calls, always_relu)


@builder
def doubled() -> nn.Module:
    """Two layers of equal integers, with different scales and biases."""
    first, second = nn.Linear(12, 12), nn.Linear(12, 12)
    with torch.no_grad():
        second.weight.copy_(2 * first.weight)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 12), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(12, 10))


@builder
def upscaling(kernel: int, stride: int, groups: int, output_padding: int) -> nn.Module:
    up = nn.ConvTranspose2d(8, 16, kernel, stride, output_padding=output_padding, groups=groups)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), up, nn.ReLU(), pooled)


@builder
def gated() -> nn.Module:
    """SiLU behind a convolution, as in EfficientNets."""
    stem = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True))
    return nn.Sequential(stem, nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(512, 10))


Int8 = Callable[..., Model]


@pytest.fixture
def int8(digits: Data, tmp_path: Path) -> Int8:
    """Quantize an untrained network."""

    def make(network: FunctionRef, *, is_qat: bool, backend: str) -> Model:
        ctx = Context("int8", "quant", 7, tmp_path)
        with seeded(0):
            model = Model.from_module(
                Recipe(network, classifier(SHAPE_CHW, 10)), network.resolve("builder")(**network.arguments)
            )
        if not is_qat:
            prepared = stages.prepare(PrepareConfig(backend=backend), ctx, model)
            return stages.convert(ctx, stages.calibrate(CalibrateConfig(num_samples=64), ctx, prepared, digits)[0])
        prepared = stages.prepare_qat(PrepareQatConfig(backend=backend), ctx, model)
        module = prepared.build_prepared().train()
        module(next(iter(digits.batches("train", batch_size=64))).inputs["images"])
        return stages.convert(ctx, prepared.with_state_dict_of(module.eval()))

    return make


def exported(model: Model, data: Data, folder: Path) -> OnnxFile:
    """The stage, which compares every layer with torch's."""
    return export_onnx(ExportConfig(num_samples=100), Context("onnx", "export.onnx", 7, folder), model, data)


def weights_of(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's int8 weights."""
    arrays = {array.name: numpy_helper.to_array(array) for array in onnx.load(path).graph.initializer}
    return {name: array.shape for name, array in arrays.items() if array.dtype == "int8" and array.ndim > 1}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("is_qat", "backend"), FORMS)
@pytest.mark.parametrize(
    ("is_linear", "num_calls", "always_relu"), [(False, 2, False), (False, 3, True), (True, 3, False)]
)
def test_a_layer_called_several_times(
    is_linear: bool,
    num_calls: int,
    always_relu: bool,
    is_qat: bool,
    backend: str,
    int8: Int8,
    digits: Data,
    tmp_path: Path,
) -> None:
    network = FunctionRef.to(repeated, is_linear=is_linear, num_calls=num_calls, always_relu=always_relu)
    file = exported(int8(network, is_qat=is_qat, backend=backend), digits, tmp_path)
    assert file.precision == "int8"
    nodes = [node for node in onnx.load(file.path).graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert len(nodes) == 2 + num_calls
    assert len(weights_of(file.path)) == 3


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_equal_integers_of_two_layers(backend: str, int8: Int8, digits: Data, tmp_path: Path) -> None:
    file = exported(int8(FunctionRef.to(doubled), is_qat=False, backend=backend), digits, tmp_path)
    assert sorted(weights_of(file.path).values()) == [(10, 12), (12, 12), (12, 256)]


def test_each_call_is_compared_with_its_own_grid(int8: Int8, digits: Data, tmp_path: Path) -> None:
    model = int8(
        FunctionRef.to(repeated, is_linear=False, num_calls=3, always_relu=False), is_qat=False, backend="fbgemm"
    )
    path = exported(model, digits, tmp_path).path
    with quantized_engine("fbgemm"):
        reference, int8_network = reference_network(model.build_prepared())[0], model.build()
    assert compare_exactly(path, reference, int8_network).num_layers == 5
    content = onnx.load(path)
    convolutions = [node for node in content.graph.node if node.op_type == "Conv"]
    for first, second in ((1, 2), (2, 1), (2, 3), (3, 2)):
        broken = onnx.ModelProto.FromString(content.SerializeToString())
        node = next(node for node in broken.graph.node if node.name == convolutions[first].name)
        node.input[2] = convolutions[second].input[2]
        onnx.save(broken, tmp_path / "broken.onnx")
        with pytest.raises(StageError, match=r"layer layer(_call\d)? is not the model's: its (int32 bias|bias scales)"):
            compare_exactly(tmp_path / "broken.onnx", reference, int8_network)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("is_qat", "backend"),
    [pytest.param(*form, marks=[pytest.mark.thorough] if form[0] else []) for form in FORMS],
)
@pytest.mark.parametrize(
    ("kernel", "stride", "groups", "output_padding"), [(2, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 1), (4, 2, 2, 0)]
)
def test_transposed_convolutions(
    kernel: int,
    stride: int,
    groups: int,
    output_padding: int,
    is_qat: bool,
    backend: str,
    int8: Int8,
    digits: Data,
    tmp_path: Path,
) -> None:
    options = {"kernel": kernel, "stride": stride, "groups": groups, "output_padding": output_padding}
    model = int8(FunctionRef.to(upscaling, **options), is_qat=is_qat, backend=backend)
    file = exported(model, digits, tmp_path)
    # fbgemm does not give weights of 2x2 back: the layer is float there, or with stride 2 another form of it is int8.
    is_float = (kernel, stride) == (2, 1) and backend == "fbgemm" and not is_fbgemm_right
    assert ((8, 16 // groups, kernel, kernel) in weights_of(file.path).values()) is not is_float


@pytest.mark.parametrize(("is_qat", "backend"), FORMS)
def test_silu_runs_as_integer_kernels(is_qat: bool, backend: str, int8: Int8, digits: Data, tmp_path: Path) -> None:
    file = exported(int8(FunctionRef.to(gated), is_qat=is_qat, backend=backend), digits, tmp_path)
    kernels = Kernels.of(file.path, tmp_path)
    assert not kernels.float
    assert {name: kernels.integer[name] for name in ("QLinearConv", "QLinearSigmoid", "QLinearMul")} == {
        "QLinearConv": 2,
        "QLinearSigmoid": 2,
        "QLinearMul": 2,
    }
