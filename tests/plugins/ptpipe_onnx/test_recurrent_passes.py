"""Dynamically quantized LSTM and GRU layers in files.

Shape legend: L steps, B samples, I inputs, S features of the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from ptpipe import StageError
from ptpipe_onnx import graph, recurrent_passes
from ptpipe_onnx.coverage import coverage_of
from ptpipe_onnx.export import build_graph
from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.saturation import Saturation, saturation_of
from ptpipe_quant.transforms import to_dynamic_int8
from ptpipe_torch import BATCH, FunctionRef, Model, OnnxFile, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.int8.int8_state import pack_state
from ptpipe_torch.int8.recurrent import DynamicRecurrent, recurrent_error
from ptpipe_torch.runtime import seeded

from ...processor import reduced

NUM_INPUTS, S = 6, 20
INPUTS = [
    {"x": np.random.default_rng(0).normal(size=(*shape, NUM_INPUTS)).astype(np.float32)}
    for shape in ((1, 1), (3, 9), (2, 40))
]
SCHEMES = [
    (backend, weights)
    for backend, weights in (("fbgemm", "per_channel"), ("qnnpack", "per_tensor"))
    if backend in supported_engines()
]


class Sequences(nn.Module):
    """A layer, called twice: from zeros, and from the state that it ended in."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(NUM_INPUTS, S, **options)

    def forward(self, x_BLI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x_BLI if self.layer.batch_first else x_BLI.transpose(0, 1)
        y, state = self.layer(x)
        z, last = self.layer(x, state)
        outputs = (y, z) if self.layer.batch_first else (y.transpose(0, 1), z.transpose(0, 1))
        states = [part for both in (state, last) for part in (both if isinstance(both, tuple) else (both,))]
        return *outputs, *(part.transpose(0, 1) for part in states)


@builder
def sequences(**options: Any) -> nn.Module:
    return Sequences(**options)


def int8_model(backend: str, weights: str, kind: str, **options: Any) -> Model:
    directions = 2 if options.get("bidirectional") else 1
    num_states = directions * options.get("num_layers", 1)
    states = [f"{name}_{call}" for call in "yz" for name in ("hidden", "cell")[: 2 if kind == "LSTM" else 1]]
    outputs = [TensorSpec(name, "float32", (BATCH, "length", directions * S)) for name in "yz"] + [
        TensorSpec(name, "float32", (BATCH, num_states, S)) for name in states
    ]
    signature = Signature((TensorSpec("x", "float32", (BATCH, "length", NUM_INPUTS)),), tuple(outputs))
    reference = FunctionRef.to(sequences, kind=kind, **options)
    convert = FunctionRef.to(to_dynamic_int8, weights=weights, narrow_weights=reduced(backend), layers=["layer"])
    with seeded(0):
        model = Model.from_module(
            Recipe(reference, signature, (), (convert,), backend), Sequences(**reference.arguments)
        )
    return Model(model.recipe, model.tensors, pack_state(model.build().state_dict()))


def written(model: Model, path: Path) -> tuple[OnnxFile, Mapping[str, str], Saturation]:
    """Return the file, why layers of it are float, and which can saturate."""
    built = build_graph(model, opset=18)
    saturation = saturation_of(built.model.graph, {})
    graph.set_shapes(built.model.graph, model.signature)
    graph.write(built.model, path)
    onnx.checker.check_model(str(path), full_check=True)
    return OnnxFile(path, model.signature, built.precision), built.float_reasons, saturation


def differences(file: OnnxFile, model: Model) -> Iterator[tuple[float, float]]:
    """Yield the largest difference between file and model, and that between the int8 and the float model."""
    float_model = Model(Recipe(model.recipe.builder, model.signature), model.tensors)
    with (
        file.with_exact_sums().predictor(1) as onnx_predict,
        model.predictor(1) as torch_predict,
        float_model.predictor(1) as float_predict,
    ):
        for inputs in INPUTS:
            found, expected, exact = (predict(inputs) for predict in (onnx_predict, torch_predict, float_predict))
            for name, array in expected.items():
                assert found[name].shape == array.shape
                yield np.abs(found[name] - array).max(), np.abs(array - exact[name]).max()


def formula_errors(file: OnnxFile, model: Model) -> Iterator[float]:
    """Yield how far each call of the file's layer is from its formula; 1: all that rounding explains.

    A state halfway between two integers may become the other one than in torch, and all steps after it follow.
    """
    layer = cast(DynamicRecurrent, model.build().layer)

    def returned(found: Mapping[str, np.ndarray], call: str) -> tuple[torch.Tensor, Any]:
        y_BLS, *states = (torch.from_numpy(array) for name, array in found.items() if name.endswith(call))
        last = tuple(state.transpose(0, 1).contiguous() for state in states)
        return y_BLS if layer.batch_first else y_BLS.transpose(0, 1), last if layer.mode == "LSTM" else last[0]

    with file.with_exact_sums().predictor(1) as predict:
        for inputs in INPUTS:
            found, x_BLI = predict(inputs), torch.from_numpy(inputs["x"])
            x = x_BLI if layer.batch_first else x_BLI.transpose(0, 1)
            first, second = returned(found, "y"), returned(found, "z")
            yield recurrent_error(layer, first, x)
            yield recurrent_error(layer, second, x, first[1])


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRU layers of any size as a Scan."""
    monkeypatch.setattr(recurrent_passes, "MIN_GRU_FEATURES", 1)


@pytest.mark.usefixtures("scans")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("backend", "weights"), SCHEMES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"batch_first": True, "bidirectional": True}),
        ("LSTM", {"bias": False}),
        ("GRU", {"batch_first": True, "bidirectional": True}),
        ("GRU", {"bias": False}),
    ],
)
def test_a_file_computes_the_integers_that_torch_does(
    kind: str, options: Any, backend: str, weights: str, tmp_path: Path
) -> None:
    model = int8_model(backend, weights, kind, **options)
    file, float_reasons, saturation = written(model, tmp_path / "model.onnx")
    assert all(error <= 1 for error in formula_errors(file, model))
    assert all(error > 1e-4 for _, error in differences(file, model)), "quantization is visible"
    arrays = {each.name: numpy_helper.to_array(each) for each in onnx.load(file.path).graph.initializer}
    integers = [array for array in arrays.values() if array.dtype == np.int8 and array.ndim > 1 and array.size > 4 * S]
    directions = 2 if options.get("bidirectional") else 1
    gates = 4 if kind == "LSTM" else 3
    assert sum(array.size for array in integers) == directions * gates * S * (NUM_INPUTS + S)
    assert not [name for name, array in arrays.items() if array.dtype == np.float32 and array.size > 8 * S]

    coverage = coverage_of(file.path, Kernels.of(file.path, tmp_path), {}, float_reasons)
    number = directions * (4 if kind == "LSTM" else 3)  # the product of a GRU's input is computed once
    assert coverage.counts == f"{number} of {number} recurrent products"
    assert coverage.is_as_in_the_model
    assert {layer.name for layer in saturation.layers} == {
        f"layer.weight_{of}_l0{suffix}" for of in ("ih", "hh") for suffix in ("", "_reverse")[:directions]
    }
    assert all(layer.saturates is not reduced(backend) for layer in saturation.layers)


@pytest.mark.usefixtures("scans")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_several_layers(kind: str, tmp_path: Path) -> None:
    """Integers of later layers may fall otherwise: their inputs differ by rounding."""
    model = int8_model(*SCHEMES[0], kind, num_layers=3, bidirectional=True, dropout=0.5)
    file, *_ = written(model, tmp_path / "model.onnx")
    assert all(difference < max(error, 1e-6) for difference, error in differences(file, model))


@pytest.mark.parametrize(("backend", "weights"), SCHEMES)
def test_a_small_gru_computes_in_float_with_int8_weights(backend: str, weights: str, tmp_path: Path) -> None:
    model = int8_model(backend, weights, "GRU", batch_first=True)
    file, float_reasons, _ = written(model, tmp_path / "model.onnx")
    assert all(difference < 2 * error for difference, error in differences(file, model)), "as `Parity` allows"
    proto = onnx.load(file.path)
    assert Counter(node.op_type for node in proto.graph.node)["GRU"] == 2
    sizes = Counter[int]()
    for tensor in proto.graph.initializer:
        sizes[tensor.data_type] += numpy_helper.to_array(tensor).size
    assert sizes[onnx.TensorProto.INT8] == 3 * S * (NUM_INPUTS + S)
    assert sizes[onnx.TensorProto.FLOAT] < 13 * S, "biases and scales"
    coverage = coverage_of(file.path, Kernels.of(file.path, tmp_path), {}, float_reasons)
    assert coverage.counts == "0 of 2 recurrent layers"
    assert "its float one is faster with less than 512 features: layer.weight_ih_l0" in str(coverage)
    assert not coverage.is_as_in_the_model


def test_the_other_domain_is_there_only_where_it_is_used(tmp_path: Path) -> None:
    for kind, domains in (("LSTM", {"", "com.microsoft"}), ("GRU", {""})):
        file, *_ = written(int8_model(*SCHEMES[0], kind), tmp_path / f"{kind}.onnx")
        assert {opset.domain for opset in onnx.load(file.path).opset_import} == domains


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(NUM_INPUTS, S, batch_first=True)

    def forward(self, x_BLI: torch.Tensor) -> torch.Tensor:
        lengths_B = (x_BLI[:, :, 0] != 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x_BLI, lengths_B, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return padded


@builder
def packed() -> nn.Module:
    return Packed()


def test_a_packed_sequence_is_refused() -> None:
    signature = int8_model(*SCHEMES[0], "GRU").signature
    model = Model.from_module(Recipe(FunctionRef.to(packed), signature), Packed())
    with pytest.raises(StageError, match="packed sequences have no ONNX form; call the layer with the padded one"):
        build_graph(model, opset=18)
