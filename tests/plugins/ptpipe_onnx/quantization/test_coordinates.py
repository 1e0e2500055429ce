"""Files of detectors for pictures of any size, whose boxes are made of the coordinates of pixels.

Shape legend: N pictures, C channels, H and W height and width, B boxes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx, quantize_onnx
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig
from ptpipe_onnx.quantization.coordinates import nodes_of_coordinates
from ptpipe_torch import BATCH, Data, FunctionRef, Model, Recipe, TensorSpec, Unlabeled
from ptpipe_torch.model.function_ref import builder
from ptpipe_zoo import DynamicShapesConfig, dynamic_shapes

from ....streets import street_data


class Boxes(nn.Module):
    """A box around each second pixel, in pixels, and its score."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sides, self.scores = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1)

    def forward(self, images_NCHW: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.first(images_NCHW))
        height, width = x.shape[2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centers_B2 = torch.stack([columns, rows], -1).view(-1, 2).float() * 2
        sides_NB4 = self.sides(x).exp().flatten(2).transpose(1, 2)
        boxes_NB4 = torch.cat([centers_B2 - sides_NB4[..., :2], centers_B2 + sides_NB4[..., 2:]], -1)
        return {"boxes": boxes_NB4, "scores": self.scores(x).flatten(2).sigmoid()}


@builder
def boxes() -> nn.Module:
    return Boxes()


@pytest.fixture
def data() -> Data:
    streets = street_data((3, 32, 32))
    splits = {name: replace(split, targets={}) for name, split in streets.splits.items()}
    return Data(replace(streets.info, task=Unlabeled()), splits, streets.loader)


def test_boxes_in_larger_pictures_are_not_cut_off(data: Data, tmp_path: Path) -> None:
    torch.manual_seed(0)
    outputs = (TensorSpec("boxes", "float32", (BATCH, 256, 4)), TensorSpec("scores", "float32", (BATCH, 1, 256)))
    signature = replace(data.info.signature, outputs=outputs)
    ctx = Context("net", "quant.onnx", 7, tmp_path)
    model = Model.from_module(Recipe(FunctionRef.to(boxes), signature), boxes())
    config = DynamicShapesConfig(inputs={"images": [3, "2*height", "2*width"]})
    float_file = export_onnx(ExportConfig(num_samples=8), ctx, dynamic_shapes(config, ctx, model), data)
    (tmp_path / "int8").mkdir()
    int8_file = quantize_onnx(QuantizeOnnxConfig(), replace(ctx, scratch=tmp_path / "int8"), float_file, data)
    images_NCHW = np.random.default_rng(0).normal(size=(2, 3, 96, 128)).astype(np.float32)
    with int8_file.predictor(1) as predict, float_file.predictor(1) as expect:
        found, expected = predict({"images": images_NCHW})["boxes"], expect({"images": images_NCHW})["boxes"]
    assert expected.max() > 126
    assert np.abs(found - expected).max() < 2  # a step of the sides; cut off, it was 96


def test_what_is_only_looked_up_or_compared_does_not_grow() -> None:
    nodes = [
        helper.make_node("Range", ["start", "size", "step"], ["numbers"], name="range"),
        helper.make_node("Gather", ["table", "numbers"], ["rows"], name="looked_up"),
        helper.make_node("Cast", ["numbers"], ["floats"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Less", ["floats", "limit"], ["mask"], name="compared"),
        helper.make_node("Where", ["mask", "rows", "zero"], ["chosen"], name="chosen"),
        helper.make_node("Add", ["chosen", "rows"], ["sum"], name="sum"),
        helper.make_node("Sub", ["rows", "floats"], ["differences"], name="differences"),
        helper.make_node("Sigmoid", ["differences"], ["bounded"], name="bounded"),
        helper.make_node("Mul", ["bounded", "sum"], ["product"], name="product"),
    ]
    graph = helper.make_graph(nodes, "graph", [], [])
    assert nodes_of_coordinates(graph) == ["cast", "differences"]
