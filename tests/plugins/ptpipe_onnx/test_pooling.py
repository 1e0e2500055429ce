"""Poolings: means that a network takes twice, which are one in the file, and the indices of maxima."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, PrepareConfig
from ptpipe_torch import Data, FunctionRef, Model, Recipe
from ptpipe_torch.model.function_ref import builder
from ptpipe_torch.runtime import seeded

from ...signatures import classifier
from .conftest import SHAPE_CHW


class PooledTwice(nn.Module):
    """Each branch takes means for itself, which the file takes once, and rounds in its own way.

    Means of 2 x 2 integers are ties in a quarter of all cases, which torch and ONNX Runtime round differently.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(32, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(images_NCHW))
        branches = [branch(F.avg_pool2d(x, 2)) for branch in (self.left, self.right)]
        return self.head(torch.cat(branches, 1).mean((2, 3)))


class Unpooled(nn.Module):
    """Puts maxima back to where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 3)
        self.pool, self.unpool, self.head = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2), nn.Linear(32, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x, indices = self.pool(torch.relu(self.stem(images_NCHW)))
        x = self.unpool(torch.relu(self.inner(x)), indices)
        return self.head(self.outer(x).mean((2, 3)))


@builder
def pooling(*, name: str) -> nn.Module:
    return {"PooledTwice": PooledTwice, "Unpooled": Unpooled}[name]()


@pytest.mark.parametrize("name", ["PooledTwice", "Unpooled"])
def test_each_layer_gets_the_integers_of_the_file(digits: Data, tmp_path: Path, name: str) -> None:
    ctx = Context("int8", "quant", 7, tmp_path)
    with seeded(0):
        model = Model.from_module(
            Recipe(FunctionRef.to(pooling, name=name), classifier(SHAPE_CHW, 10)), pooling(name=name)
        )
    prepared = stages.prepare(PrepareConfig(backend="fbgemm"), ctx, model)
    int8 = stages.convert(ctx, stages.calibrate(CalibrateConfig(num_samples=128), ctx, prepared, digits)[0])
    events: list[object] = []
    export_onnx(ExportConfig(), Context("onnx", "export.onnx", 7, tmp_path, _tell=events.append), int8, digits)
    figures = {event.name: event.value for event in events if hasattr(event, "name")}  # type: ignore[attr-defined]
    assert figures["layers_merged"] == 0
    assert figures["max_layer_difference_steps"] <= 1
