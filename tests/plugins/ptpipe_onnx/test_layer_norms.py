"""Layer norms that networks write out: one operator in the file, and written out again for other runtimes.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from packaging.version import Version
from torch import nn

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx, torch_exporter
from ptpipe_onnx.graph import remove_unused
from ptpipe_onnx.layer_norms import write_channel_norms_out
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import BATCH, Data, FunctionRef, Model, Recipe, Signature, TensorSpec, builder

from ...processor import ONNX_RUNTIME
from ...signatures import classifier
from .test_qdq_passes import types_of

Run = Callable[..., np.ndarray]
CHANNELS = 16
EPS = 1e-3
ATOL = 2e-5 if Version("1.27") <= ONNX_RUNTIME else 5e-5
"""Earlier versions compute a variance as the difference of two means."""


def by_mean_of_powers(x: torch.Tensor, axis: int) -> torch.Tensor:
    mean = x.mean(axis, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(axis, keepdim=True) + EPS)


def by_mean_of_products(x: torch.Tensor, axis: int) -> torch.Tensor:
    centered = x - x.mean(axis, keepdim=True)
    return centered / ((centered * centered).mean(axis, keepdim=True) + EPS) ** 0.5


def by_mean_of_squares(x: torch.Tensor, axis: int) -> torch.Tensor:
    mean = x.mean(dim=axis, keepdim=True)
    return (x - mean) * torch.rsqrt(EPS + torch.square(x - mean).mean(dim=[axis], keepdim=True))


def by_variance(x: torch.Tensor, axis: int) -> torch.Tensor:
    variance = torch.var(x, dim=axis, unbiased=False, keepdim=True)
    return (x - x.mean(axis, keepdim=True)) / (variance + EPS).sqrt()


def by_variance_with_correction(x: torch.Tensor, axis: int) -> torch.Tensor:
    variance = x.var(axis, correction=0, keepdim=True)
    return (variance + EPS).pow(-0.5) * (x - x.mean(axis, keepdim=True))


def by_both(x: torch.Tensor, axis: int) -> torch.Tensor:
    variance, mean = torch.var_mean(x, dim=axis, correction=0, keepdim=True)
    return (x - mean) * (1 / torch.sqrt(variance + EPS))


FORMS = [
    by_mean_of_powers,
    by_mean_of_products,
    by_mean_of_squares,
    by_variance,
    by_variance_with_correction,
    by_both,
]


class Norm(nn.Module):
    """One of the forms with factors and offsets, along the channels (1) or the last axis (-1)."""

    def __init__(self, form: Callable[[torch.Tensor, int], torch.Tensor], axis: int, channels: int = CHANNELS) -> None:
        super().__init__()
        self.form, self.axis = form, axis
        generator = torch.Generator().manual_seed(1)
        self.weight, self.bias = (nn.Parameter(torch.randn(channels, generator=generator)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.axis == 1:
            weight, bias = weight[:, None, None], bias.view(1, -1, 1, 1)
        return weight * self.form(x, self.axis) + bias


def signature(channels: int = CHANNELS, last: int = CHANNELS) -> Signature:
    shape = (BATCH, channels, 5, last)
    return Signature((TensorSpec("x", "float32", shape),), (TensorSpec("y", "float32", shape),))


def exported_graph(network: nn.Module, **sizes: int) -> onnx.ModelProto:
    model = torch_exporter.optimize(torch_exporter.export(network.eval(), signature(**sizes), 18))
    content = ir.to_proto(model)
    onnx.checker.check_model(content, full_check=True)
    return content


def assert_equal(model: onnx.ModelProto, network: nn.Module, run_onnx: Run, **sizes: int) -> None:
    for num_samples in (3, 1):
        shape = (num_samples, *signature(**sizes).inputs[0].shape[1:])
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(2)) * 3 + 1
        with torch.no_grad():
            expected = network(x).numpy()
        np.testing.assert_allclose(run_onnx(model.SerializeToString(), x.numpy()), expected, atol=ATOL)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("form", FORMS)
def test_forms_become_one_operator_with_the_networks_parameters(form, axis: int, run_onnx: Run) -> None:
    network = Norm(form, axis)
    model = exported_graph(network)
    assert types_of(model) == Counter({"LayerNormalization": 1} | ({"Transpose": 2} if axis == 1 else {}))
    (norm,) = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert list(norm.input[1:]) == ["weight", "bias"]
    assert_equal(model, network, run_onnx)


class Plain(nn.Module):
    """Nothing but the form, or what is made of it."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: by_variance(x, 1),
        lambda x: by_variance(x, 1) * 2,
        lambda x: by_variance(x, 1) + x,
        lambda x: by_variance(x, 1) * x[:1, :1],
        lambda x: by_variance(x, 1) * by_variance(x, 1).relu(),
        lambda x: by_variance(x, 1) + x.mean(1, keepdim=True),
        lambda x: by_variance(x, 1) * torch.full((CHANNELS, 1, 1), 3, dtype=torch.int64),
        lambda x: torch.mul(
            x - x.mean(1, keepdim=True), other=torch.rsqrt(torch.add(x.var(1, correction=0, keepdim=True), other=EPS))
        ),
    ],
)
def test_what_follows_it_is_left_as_it_is(function, run_onnx: Run) -> None:
    network = Plain(function)
    model = exported_graph(network)
    assert types_of(model)["LayerNormalization"] >= 1
    assert_equal(model, network, run_onnx)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, unbiased=False, keepdim=True) + EPS),
        lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + EPS).sqrt(),
        lambda x: (x - x.mean(2, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + EPS).sqrt(),
        lambda x: (x - x.mean(1, keepdim=True)) * (x.var(1, unbiased=False, keepdim=True) + EPS).sqrt(),
        lambda x: (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), unbiased=False, keepdim=True) + EPS).sqrt(),
        lambda x: (2 * x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + EPS).sqrt(),
        lambda x: (x - x.mean(1, keepdim=True)) / (x.pow(2).mean(1, keepdim=True) + EPS).sqrt(),
        lambda x: by_mean_of_powers(x, 1) * 0 + torch.sub(x, x.mean(1, keepdim=True), alpha=2),
        lambda x: (x.var(1, unbiased=False, keepdim=True) + EPS).sqrt() / (x - x.mean(1, keepdim=True) + 50),
        lambda x: (x.var(1, unbiased=False, keepdim=True) + EPS).sqrt() / (x - x.mean(1, keepdim=True)) * 1e-6,
        lambda x: (
            (x.double() - x.double().mean(1, keepdim=True))
            .div((x.double().var(1, unbiased=False, keepdim=True) + EPS).sqrt())
            .float()
        ),
        lambda x: x / (x.relu().var(1, unbiased=False, keepdim=True) + x.abs()).sqrt(),
    ],
)
def test_other_formulas_stay(function, run_onnx: Run) -> None:
    network = Plain(function)
    model = exported_graph(network)
    assert types_of(model)["LayerNormalization"] == ("by_mean" in function.__code__.co_names[0])
    assert_equal(model, network, run_onnx)


def test_few_channels_stay_where_transpositions_take_longer(run_onnx: Run) -> None:
    network = Norm(by_variance, 1, 15)
    model = exported_graph(network, channels=15)
    assert not types_of(model)["LayerNormalization"]
    assert_equal(model, network, run_onnx, channels=15)


def test_an_axis_of_any_size_stays(run_onnx: Run) -> None:
    network = Plain(lambda x: by_variance(x, 1))
    shape = (BATCH, "length")
    open_signature = Signature((TensorSpec("x", "float32", shape),), (TensorSpec("y", "float32", shape),))
    model = ir.to_proto(torch_exporter.optimize(torch_exporter.export(network, open_signature, 18)))
    assert not types_of(model)["LayerNormalization"]
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    np.testing.assert_allclose(run_onnx(model.SerializeToString(), x.numpy()), network(x).numpy(), atol=1e-5)


def test_a_norm_of_a_norm(run_onnx: Run) -> None:
    network = nn.Sequential(Norm(by_variance, 1), Norm(by_mean_of_powers, -1))
    model = exported_graph(network)
    assert types_of(model)["LayerNormalization"] == 2
    assert_equal(model, network, run_onnx)


class NormalizedImages(nn.Module):
    """Convolutions with norms of channels between them, written out and as `F.layer_norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 3)
        self.norm, self.other = Norm(by_mean_of_powers, 1), nn.LayerNorm(CHANNELS, EPS)
        self.head = nn.Linear(CHANNELS * 196, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(images)).relu()
        x = self.other(self.second(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        logits: torch.Tensor = self.head(x.relu().flatten(1))
        return logits


@builder
def normalized_images() -> nn.Module:
    return NormalizedImages()


def normalized_model() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Model.from_module(
            Recipe(FunctionRef.to(normalized_images), classifier((1, 16, 16), 10)), normalized_images()
        )


@pytest.mark.parametrize("precision", ["float", "int8"])
def test_they_are_written_out_again(precision: str, digits: Data, tmp_path: Path, run_onnx: Run) -> None:
    ctx, model = Context("onnx", "export.onnx", 7, tmp_path), normalized_model()
    if precision == "int8":
        model = convert(
            ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(), ctx, model), digits).model
        )
    path = export_onnx(ExportConfig(num_samples=50), ctx, model, digits).path
    assert types_of(onnx.load(path))["LayerNormalization"] == 2
    content: Any = ir.load(path)
    assert write_channel_norms_out(content.graph)
    assert not write_channel_norms_out(content.graph)
    remove_unused(content)
    after = ir.to_proto(content)
    onnx.checker.check_model(after, full_check=True)
    counts = types_of(after)
    assert not counts["LayerNormalization"] and not counts["Transpose"] and counts["ReduceMean"] == 4
    images_NCHW = next(iter(digits.batches("test", batch_size=64))).inputs["images"].numpy()
    expected, found = (run_onnx(each, images_NCHW) for each in (path, after.SerializeToString()))
    step = 0 if precision == "float" else np.diff(np.unique(expected)).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 + 2 * step)
