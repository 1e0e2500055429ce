"""torch's int8 layers and those of the file compute the same integers from the same integers.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_onnx.layerwise import integers_of
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, PrepareConfig, PrepareQatConfig
from ptpipe_torch import Data, FunctionRef, Model, Recipe
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.int8_recorder import Int8Recorder
from ptpipe_torch.int8.layer_parity import layer_name, quantize_nodes
from ptpipe_torch.model.function_ref import builder
from ptpipe_torch.runtime import seeded

from ...signatures import classifier

SHAPE_CHW = (1, 16, 16)
LAYERS = ["stem", "depthwise", "pointwise", "grouped", "plain", "rows", "hidden", "head"]


class AllForms(nn.Module):
    """Convolutions of all forms, with and without batch norm, ReLU and ReLU6, a residual sum, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2d(16), nn.ReLU())
        self.pointwise = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.grouped = nn.Sequential(nn.Conv2d(16, 24, 3, 1, 1, groups=4), nn.ReLU())
        self.plain = nn.Conv2d(24, 8, 3, 1, 1)
        self.rows = nn.Linear(7, 12)
        self.hidden, self.dropout, self.head = nn.Linear(8 * 7 * 12, 32), nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.stem(images_NCHW)
        x = torch.relu(self.pointwise(self.depthwise(x)) + x)
        x = self.rows(self.plain(self.grouped(x)))
        return self.head(self.dropout(torch.relu(self.hidden(x.flatten(1)))))


class Gates(nn.Module):
    """Activations with negative values, whose zero points are odd as often as even, gates and all kinds of means."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.squeeze = nn.Conv2d(1, 16, 3, 2, 1), nn.AdaptiveAvgPool2d(1)
        self.reduce, self.expand = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)
        self.pool, self.inner, self.outer = nn.AvgPool2d(2), nn.Conv2d(16, 12, 3, padding=1), nn.Conv2d(12, 20, 1)
        self.head = nn.Linear(20, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = F.hardswish(self.stem(images_NCHW))
        x = x * F.hardsigmoid(self.expand(F.silu(self.reduce(self.squeeze(x)))))
        x = F.silu(self.inner(self.pool(x)))
        x = F.silu(self.outer(F.avg_pool2d(x, 3, 1, 1)))
        return self.head(x.mean((2, 3)))


@builder
def network(*, name: str) -> nn.Module:
    return {"AllForms": AllForms, "Gates": Gates}[name]()


def int8_model(data: Data, folder: Path, name: str, *, is_qat: bool, **scheme: str) -> Model:
    ctx = Context("int8", "quant", 7, folder)
    with seeded(0):
        float_network = network(name=name)
        for layer in float_network.modules():
            if getattr(layer, "bias", None) is not None:
                nn.init.normal_(layer.bias, std=0.5)
        float_network.train()(next(iter(data.batches("train", batch_size=64))).inputs["images"])
        recipe = Recipe(FunctionRef.to(network, name=name), classifier(SHAPE_CHW, 10))
        model = Model.from_module(recipe, float_network)
    if not is_qat:
        prepared = stages.prepare(PrepareConfig.model_validate(scheme), ctx, model)
        return stages.convert(ctx, stages.calibrate(CalibrateConfig(num_samples=128), ctx, prepared, data)[0])
    prepared = stages.prepare_qat(PrepareQatConfig.model_validate(scheme), ctx, model)
    module = prepared.build_prepared().train()
    module(next(iter(data.batches("train", batch_size=64))).inputs["images"])
    return stages.convert(ctx, prepared.with_state_dict_of(module.eval()))


@dataclass(frozen=True)
class Compared:
    """The integers of a layer; `zero_point`: of their grid."""

    name: str
    in_torch: torch.Tensor
    in_file: torch.Tensor
    zero_point: int

    @property
    def differs(self) -> torch.Tensor:
        return (self.in_torch.float() - self.in_file.float()).abs().gt(0.01).double()


class Layers(Int8Recorder):
    """Gives each layer of an int8 network the integers that the file computed in front of it."""

    def __init__(self, int8: GraphModule, reference: GraphModule, in_file: dict[str, torch.Tensor]) -> None:
        super().__init__(int8, reference)
        self.in_file = in_file

    def run_node(self, n: Node) -> Any:
        before = set(self.found)
        result = super().run_node(n)
        for name in self.found.keys() - before:
            if (integers := self.in_file.get(name)) is not None and not integers.is_floating_point():
                return torch._make_per_tensor_quantized_tensor(integers, result.q_scale(), result.q_zero_point())
        return result


def compared_integers(model: Model, backend: str, data: Data, folder: Path) -> dict[str, Compared]:
    """Return what torch's layers and those of the file compute, from what the file computed in front of them."""
    file = export_onnx(ExportConfig(num_samples=100), Context("onnx", "export.onnx", 7, folder), model, data)
    (batch,) = data.batches("test", batch_size=300)
    with quantized_engine(backend), torch.no_grad(), deprecations_silenced():
        reference, _ = reference_network(model.build_prepared())
        found = integers_of(file.path, reference, {"images": batch.inputs["images"].numpy()}, folder)
        recorder = Layers(model.build(), reference, found)
        recorder.run(batch.inputs["images"])
    return {
        node.name: Compared(layer_name(node, reference), recorder.found[node.name], found[node.name], int(node.args[2]))
        for node in quantize_nodes(reference)
        if node.name in found and node.name in recorder.found
    }


@pytest.mark.sampled(7)
@pytest.mark.parametrize("is_qat", [False, True])
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("weights", ["per_channel", "per_tensor"])
def test_torch_and_the_file_compute_the_same_integers(
    is_qat: bool, backend: str, weights: str, digits: Data, tmp_path: Path
) -> None:
    model = int8_model(digits, tmp_path, "AllForms", is_qat=is_qat, backend=backend, weights=weights)
    compared = list(compared_integers(model, backend, digits, tmp_path).values())
    assert {layer.name.partition(".")[0] for layer in compared} >= {*LAYERS, "add"}
    assert compared[0].name.startswith("the input")
    # What dropout returns is compared on a grid that neither has: in floats.
    differs = {layer.name: layer.differs for layer in compared}
    assert differs.pop("add").mean() < 1e-4  # both sum two floats, in another order
    # Unrounded biases differ in some values in a thousand. qnnpack multiplies by the reciprocal of the output's scale,
    # by which ONNX Runtime divides: which values are ties in it depends on the weights' last bits, and they on the
    # processor and its threads. fbgemm adds float32 numbers, one of which may be off by its last bit.
    single, share = (0, 1e-5) if backend == "fbgemm" else (1, 1e-4)
    found_ties = {name: (int(differ.sum()), differ.numel()) for name, differ in differs.items()}
    assert {name: n for name, n in found_ties.items() if n[0] > single + share * n[1]} == {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_qat", [False, True])
@pytest.mark.parametrize("backend", ["fbgemm", "x86", "qnnpack"])
def test_means_of_activations_with_negative_values_are_the_same(
    is_qat: bool, backend: str, digits: Data, tmp_path: Path
) -> None:
    model = int8_model(digits, tmp_path, "Gates", is_qat=is_qat, backend=backend, weights="per_channel")
    compared = list(compared_integers(model, backend, digits, tmp_path).values())
    means = [layer for layer in compared if any(name in layer.name for name in ("squeeze", "pool", "mean"))]
    assert len(means) == 4
    assert {layer.zero_point % 2 for layer in compared if layer.zero_point} == {0, 1}
    # ONNX Runtime adds multiples of the scale in windows: it rounds a fifth of the halves to the other side.
    shares = {layer.name: layer.differs.mean() for layer in means}
    assert shares.pop("pool") < 0.06
    assert {name: share for name, share in shares.items() if share > 1e-5} == {}
