"""Networks that have no ONNX form: the error names the operator, the module, the line, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_onnx.checks import unsupported_opset
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, PrepareConfig
from ptpipe_torch import Data, FunctionRef, Model, OnnxFile, Recipe, builder
from ptpipe_torch.int8.engine import supported_engines

from ...signatures import classifier
from .conftest import SHAPE_CHW

Export = Callable[..., OnnxFile]

FAILED = "this network can't be exported to ONNX: "
NO_FORM = ". Write it with other operators, or compute that part outside of the network"
VALUES_DECIDE = (
    ". Compute all cases and choose one by torch.where, give sizes as numbers, multiply by a mask in place of "
    "selecting by it (x[mask]), or compute that part outside of the network"
)


@torch.library.custom_op("ptpipe_test::rotate", mutates_args=())
def rotate(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, -1)


@rotate.register_fake
def _shape_of_rotated(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Eigenvalues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.linalg.eigvalsh(x + x.mT).unsqueeze(-1)


class OwnKernels(nn.Module):
    """A convolution behind another one, whose name in the exported graph it has in the quantized one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels = x.amax((2, 3)).reshape(-1, 1, 1)
        y = nn.functional.conv1d(x.reshape(1, -1, x[0, 0].numel()), kernels, groups=len(x) * x.shape[1])
        return y.reshape(x.shape)


class Rotation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x)


class ExportableRotation(nn.Module):
    """The remedy, for an operator that is to stay where the network runs in torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, -1) if torch.compiler.is_exporting() else rotate(x)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            x = x * 2
        return x


class Choice(nn.Module):
    """The remedy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.mean() > 0, x * 2, x)


class Count(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * nn.functional.one_hot(x.flatten(1).argmax(1)).sum()


class FixedCount(nn.Module):
    """The remedy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * nn.functional.one_hot(x.flatten(1).argmax(1), 256).sum(1).view(-1, 1, 1, 1)


class FiveAxes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(-1, 2, 1, 8, 16)
        return nn.functional.scaled_dot_product_attention(y, y, y).view(x.shape)


class FourAxes(nn.Module):
    """The remedy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(-1, 2, 8, 16)
        return nn.functional.scaled_dot_product_attention(y, y, y).reshape(x.shape)


class OnnxAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(-1, 2, 8, 16)
        return torch.onnx.ops.attention(y, y, y)[0].reshape(x.shape)


class Empty(nn.Module):
    """Normalizes no channels: torch can, and ONNX Runtime can't."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.layer_norm(x[..., :0], (0,)).sum(-1, keepdim=True)


class Masked(nn.Module):
    """Changes its weight in the forward pass, as masked convolutions of PixelCNN are often written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.register_buffer("mask", torch.ones(16, 16).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data *= self.mask
        return x @ self.weight


class MaskedProduct(Masked):
    """The remedy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.mask)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # torch prefers torch.export
            self.part: Any = torch.jit.script(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.part(x)
        return result


class Other(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise TypeError("x\n\x1b[31mis of another kind")


BLOCKS = {
    kind.__name__: kind
    for kind in (
        *(Eigenvalues, OwnKernels, Rotation, ExportableRotation, Branch, Choice, Count, FixedCount, FiveAxes, FourAxes),
        *(OnnxAttention, Masked, MaskedProduct, Scripted, Other, Empty),
    )
}


@builder
def network(kind: str) -> nn.Module:
    """A network with a block of this kind in its third module."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    return nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.Sequential(BLOCKS[kind]()), head)


def model_of(kind: str) -> Model:
    torch.manual_seed(1)
    return Model.from_module(Recipe(FunctionRef.to(network, kind=kind), classifier(SHAPE_CHW, 10)), network(kind))


def place(code: str) -> str:
    """The end of a phrase about a line of this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.strip() == code)
    return f" (module 2.0, {__file__}:{number}: `{code}`)"


UNTRANSLATABLE = {
    "Eigenvalues": "aten.linalg_eigvalsh has no ONNX form"
    + place("return x + torch.linalg.eigvalsh(x + x.mT).unsqueeze(-1)")
    + NO_FORM,
    "Rotation": "ptpipe_test.rotate has no ONNX form" + place("return rotate(x)") + NO_FORM,
    "FiveAxes": "aten.scaled_dot_product_attention can't be translated (AssertionError: only 4D query, key, and value "
    "are supported)" + place("return nn.functional.scaled_dot_product_attention(y, y, y).view(x.shape)") + NO_FORM,
    "OwnKernels": "aten.conv1d with a group for each sample has no ONNX form but for images of one size"
    + place("y = nn.functional.conv1d(x.reshape(1, -1, x[0, 0].numel()), kernels, groups=len(x) * x.shape[1])")
    + NO_FORM,
    "Branch": "a branch, a loop or a size depends on values of tensors" + place("if x.mean() > 0:") + VALUES_DECIDE,
    "Count": "a branch, a loop or a size depends on values of tensors"
    + place("return x * nn.functional.one_hot(x.flatten(1).argmax(1)).sum()")
    + VALUES_DECIDE,
    "Masked": "the forward pass of 2.0 changes a parameter (weight.data *= mask) or makes a tensor that it keeps: "
    "compute a new tensor, as F.conv2d(x, weight * mask, bias) does, which also becomes int8",
    "Scripted": "2.0.part is TorchScript, which torch.export can't trace: take the module that was scripted",
    "Other": "TypeError: x" + place('raise TypeError("x\\n\\x1b[31mis of another kind")'),
}


@pytest.mark.parametrize("kind", UNTRANSLATABLE)
def test_the_operator_and_its_line_are_named(
    kind: str, run_export: Export, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(StageError) as raised:
        run_export(model_of(kind))
    assert str(raised.value) == FAILED + UNTRANSLATABLE[kind]
    assert capfd.readouterr() == ("", ""), "torch prints graphs and hints"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        *((kind, "fx") for kind in ("Eigenvalues", "OwnKernels", "Branch", "Count")),
        pytest.param("Rotation", "fx", marks=pytest.mark.thorough),
        ("Eigenvalues", "export"),
    ],
)
def test_the_line_is_named_behind_quantization(
    kind: str, route: str, run_export: Export, digits: Data, tmp_path: Path
) -> None:
    """The int8 network is a graph, whose nodes have the lines; `Branch` is a module in it, which stays float."""
    ctx = Context("int8", "quant", 7, tmp_path)
    config = PrepareConfig(backend=supported_engines()[0], route=route)
    prepared = stages.prepare(config, ctx, model_of(kind))
    model = stages.convert(ctx, stages.calibrate(CalibrateConfig(num_samples=64), ctx, prepared, digits)[0])
    with pytest.raises(StageError) as raised:
        run_export(model)
    assert str(raised.value) == FAILED + UNTRANSLATABLE[kind]


@pytest.mark.parametrize("is_int8", [False, True])
def test_what_onnx_runtime_cannot_run_is_one_line(
    is_int8: bool, run_export: Export, digits: Data, tmp_path: Path
) -> None:
    model, ctx = model_of("Empty"), Context("int8", "quant", 7, tmp_path)
    if is_int8:
        prepared = stages.prepare(PrepareConfig(backend=supported_engines()[0], skip=["2"]), ctx, model)
        model = stages.convert(ctx, stages.calibrate(CalibrateConfig(num_samples=64), ctx, prepared, digits)[0])
    with pytest.raises(StageError, match=r"^ONNX Runtime can't run \w+\.onnx: .*LayerNormalization.*$"):
        run_export(model)


@pytest.mark.parametrize("kind", ["ExportableRotation", "Choice", "FixedCount", "FourAxes", "MaskedProduct"])
def test_the_remedies_work(kind: str, run_export: Export) -> None:
    assert run_export(model_of(kind)).parity["num_samples"] == 200


@pytest.mark.parametrize("opset", [18, 20])
def test_an_opset_that_lacks_an_operator_is_refused(opset: int, run_export: Export, tmp_path: Path) -> None:
    """The exporter writes such a file for opset 18, which no runtime reads, and can't convert it to 20."""
    with pytest.raises(StageError) as raised:
        run_export(model_of("OnnxAttention"), opset=opset)
    assert str(raised.value) == (
        f"opset: {opset} is too low for onnx.Attention, an operator of opset 23"
        + place("return torch.onnx.ops.attention(y, y, y)[0].reshape(x.shape)")
        + ". Set opset: 23, or call an operator of torch's in its place"
    )
    assert not list(tmp_path.iterdir())


def test_the_opset_that_the_message_names_works(run_export: Export) -> None:
    if (message := unsupported_opset(23)) is not None:
        pytest.skip(message)
    content = onnx.load(run_export(model_of("OnnxAttention"), opset=23).path)
    assert [node.op_type for node in content.graph.node].count("Attention") == 1
    assert content.opset_import[0].version == 23
