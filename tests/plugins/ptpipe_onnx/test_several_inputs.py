"""Networks of several inputs and outputs, named by their signature, from float to int8 and ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe_onnx import graph
from ptpipe_onnx.export import build_graph
from ptpipe_quant import stages
from ptpipe_quant.config import DynamicConfig, PrepareConfig, PrepareQatConfig
from ptpipe_torch import BATCH, FunctionRef, Model, OnnxFile, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.runtime import seeded

SIGNATURE = Signature(
    (
        TensorSpec("images", "float32", (BATCH, 3, 8, 8)),
        TensorSpec("numbers", "float32", (BATCH, 5)),
        TensorSpec("place", "int64", (BATCH,)),
    ),
    (TensorSpec("price", "float32", (BATCH, 1)), TensorSpec("features", "float32", (BATCH, 16))),
)


class House(nn.Module):
    """A picture, numbers and a category."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.numbers, self.places = nn.Linear(5, 8), nn.Embedding(4, 8)
        self.hidden, self.head = nn.Linear(24, 16), nn.Linear(16, 1)

    def forward(self, images: torch.Tensor, numbers: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [self.stem(images).flatten(1), self.numbers(numbers).relu(), self.places(place)]
        features = self.hidden(torch.cat(parts, 1)).relu()
        return self.head(features), features


@builder
def house() -> nn.Module:
    return House()


class NamedHouse(House):
    """Returns a mapping, in another order than that of the signature."""

    def forward(self, images: torch.Tensor, numbers: torch.Tensor, place: torch.Tensor) -> Any:
        price, features = super().forward(images, numbers, place)
        return {"features": features, "price": price}


@builder
def named_house() -> nn.Module:
    return NamedHouse()


@pytest.fixture
def model() -> Model:
    with seeded(0):
        return Model.from_module(Recipe(FunctionRef.to(house), SIGNATURE), house())


@pytest.fixture
def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "images": rng.normal(size=(64, 3, 8, 8)).astype(np.float32),
        "numbers": rng.normal(size=(64, 5)).astype(np.float32),
        "place": rng.integers(0, 4, 64),
    }


def outputs_of(model: Model | OnnxFile, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    exact = model.with_exact_sums() if isinstance(model, OnnxFile) else model
    with exact.predictor(1) as predict:
        return predict(inputs)


def exported(model: Model, path: Path) -> OnnxFile:
    built = build_graph(model, opset=18)
    graph.set_shapes(built.model.graph, model.signature)
    graph.write(built.model, path)
    return OnnxFile(path, model.signature, built.precision)


def int8(model: Model, inputs: dict[str, np.ndarray], ctx: Context, backend: str, path: str) -> Model:
    if path == "dynamic":
        return stages.dynamic(DynamicConfig(backend=backend), ctx, model)
    if path == "static":
        prepared = stages.prepare(PrepareConfig(backend=backend, observer="min_max"), ctx, model)
        module = prepared.build_prepared()
    else:
        prepared = stages.prepare_qat(PrepareQatConfig(backend=backend), ctx, model)
        module = prepared.build_prepared().train()
    with torch.no_grad():
        module(*(torch.from_numpy(inputs[spec.name]) for spec in SIGNATURE.inputs))
    return stages.convert(ctx, prepared.with_state_dict_of(module.eval()))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", supported_engines())
@pytest.mark.parametrize("path", ["dynamic", "static", "qat"])
def test_int8_and_its_file_compute_the_network(model: Model, inputs, tmp_path: Path, path: str, backend: str) -> None:
    ctx = Context("int8", "quant", 7, tmp_path)
    expected = outputs_of(model, inputs)
    converted = int8(model, inputs, ctx, backend, path)
    file = exported(converted, tmp_path / "int8.onnx")
    for found in (outputs_of(converted, inputs), outputs_of(file, inputs)):
        assert list(found) == ["price", "features"]
        for name, values in found.items():
            assert np.abs(values - expected[name]).max() < 0.1 * np.ptp(expected[name])


def test_the_float_file_has_the_names_and_a_batch_of_any_size(model: Model, inputs, tmp_path) -> None:
    file = exported(model, tmp_path / "float.onnx")
    for size in (1, 7):
        few = {name: array[:size] for name, array in inputs.items()}
        expected, found = outputs_of(model, few), outputs_of(file, few)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5)


def test_a_mapping_in_another_order(model: Model, inputs, tmp_path: Path) -> None:
    named = Model.from_module(Recipe(FunctionRef.to(named_house), SIGNATURE), model.build())
    expected = outputs_of(model, inputs)
    converted = int8(named, inputs, Context("int8", "quant", 7, tmp_path), supported_engines()[0], "static")
    for float_or_int8, tolerance in ((named, 1e-4), (converted, 0.1)):
        for found in (outputs_of(float_or_int8, inputs), outputs_of(exported(float_or_int8, tmp_path / "a"), inputs)):
            assert list(found) == ["price", "features"]
            for name, values in found.items():
                assert np.abs(values - expected[name]).max() < tolerance * np.ptp(expected[name])
