"""Text networks as ONNX files, for texts of any length in batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from ptpipe import Context, StageError
from ptpipe_onnx import graph
from ptpipe_onnx.export import build_graph
from ptpipe_onnx.recurrent import recurrent_replacements
from ptpipe_torch import BATCH, Data, FunctionRef, Model, OnnxFile, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.runtime import seeded

from ...texts import TAGS, network_of, quantized, text_data, texts, trained

LENGTHS, BATCHES = (1, 7, 16, 20), (1, 5)
MAX_LENGTH = LENGTHS[-1]
CASES = [
    ("transformer", "float", "fbgemm"),
    ("transformer", "dynamic", "fbgemm"),
    ("transformer", "static", "fbgemm"),
    ("transformer", "static", "qnnpack"),
    ("transformer", "qat", "fbgemm"),
    ("causal", "float", "fbgemm"),
    ("causal", "static", "fbgemm"),
    ("lstm", "float", "fbgemm"),
    ("lstm", "dynamic", "qnnpack"),
    ("lstm", "static", "fbgemm"),
]


@pytest.fixture(scope="module")
def sets() -> dict[str, Data]:
    pooled = text_data(max_length=MAX_LENGTH)
    per_token = text_data(TAGS, max_length=MAX_LENGTH)
    return {"transformer": pooled, "lstm": pooled, "causal": per_token}


@pytest.fixture(scope="module")
def models(sets: dict[str, Data], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    ctx = Context("net", "model.test", 7, tmp_path_factory.mktemp("nets"))
    return {name: trained(network_of(name, data, ctx), data) for name, data in sets.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "path", "backend"), CASES)
def test_a_file_computes_what_torch_does_at_every_length(
    name: str,
    path: str,
    backend: str,
    models: dict[str, Model],
    sets: dict[str, Data],
    run_export: Callable[..., OnnxFile],
    tmp_path,
) -> None:
    if backend not in supported_engines():
        pytest.skip(f"no {backend} here")
    model, data = models[name], sets[name]
    if path != "float":
        model = quantized(model, data, Context("int8", "quant.test", 7, tmp_path), backend, path)
    file = run_export(model, data, num_samples=64)
    tokens_BL = texts(BATCHES[-1], 9, max_length=MAX_LENGTH)
    with file.with_exact_sums().predictor(1) as onnx_predict, model.predictor(1) as torch_predict:
        for length in LENGTHS:
            for size in BATCHES:
                inputs = {"tokens": np.ascontiguousarray(tokens_BL[:size, :length])}
                found, expected = onnx_predict(inputs)["logits"], torch_predict(inputs)["logits"]
                allowed = 1e-5 if path == "float" else 0.05
                assert np.abs(found - expected).max() <= allowed * np.ptp(expected)
    shape = onnx.load(file.path).graph.input[0].type.tensor_type.shape
    assert [axis.dim_param for axis in shape.dim] == ["batch", "length"]
    if path != "float":
        floats = [array for array in arrays_of(file) if array.dtype == np.float32 and array.size > 192]
        assert all(array.shape[-1] == 1 for array in floats), "scales alone"


def arrays_of(file: OnnxFile) -> list[np.ndarray]:
    return [numpy_helper.to_array(tensor) for tensor in onnx.load(file.path).graph.initializer]


class Recurrent(nn.Module):
    """A recurrent layer with all that ONNX's has, called twice, and one that gets a state."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.batch_first = options["batch_first"]
        self.num_features = options.get("proj_size", 5)
        options = {"num_layers": 2, "bidirectional": True, **options}
        self.first, self.second = (getattr(nn, kind)(size, 5, **options) for size in (6, 2 * self.num_features))
        self.inputs = nn.Linear(2 * self.num_features, 6)

    def forward(self, x_BLI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x_BLI if self.batch_first else x_BLI.transpose(0, 1)
        y, _ = self.first(x)
        y, state = self.first(self.inputs(y))
        z, last = self.second(y, state)
        z_BLS = z if self.batch_first else z.transpose(0, 1)
        return z_BLS, *(part.transpose(0, 1) for part in (last if isinstance(last, tuple) else (last,)))


@builder
def recurrent(*, kind: str, options: dict[str, Any]) -> nn.Module:
    return Recurrent(kind, options)


def recurrent_model(kind: str, options: dict[str, Any]) -> Model:
    with seeded(0):
        network = recurrent(kind=kind, options=options)
    assert isinstance(network, Recurrent)
    outputs = [TensorSpec("y", "float32", (BATCH, "length", 2 * network.num_features))]
    outputs.append(TensorSpec("hidden", "float32", (BATCH, 4, network.num_features)))
    if kind == "LSTM":
        outputs.append(TensorSpec("cell", "float32", (BATCH, 4, 5)))
    signature = Signature((TensorSpec("x", "float32", (BATCH, "length", 6)),), tuple(outputs))
    return Model.from_module(Recipe(FunctionRef.to(recurrent, kind=kind, options=options), signature), network)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"batch_first": True}) for kind in ("LSTM", "GRU", "RNN")),
        *((kind, {"batch_first": False, "bias": False}) for kind in ("LSTM", "GRU", "RNN")),
        ("RNN", {"batch_first": True, "nonlinearity": "relu"}),
        ("LSTM", {"batch_first": True, "proj_size": 3}),
        ("LSTM", {"batch_first": False, "bias": False, "proj_size": 3}),
    ],
)
def test_recurrent_layers_of_every_kind(kind: str, options: dict[str, Any], tmp_path) -> None:
    model = recurrent_model(kind, options)
    signature = model.signature
    built = build_graph(model, opset=18).model
    graph.set_shapes(built.graph, signature)
    graph.write(built, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    file = OnnxFile(tmp_path / "model.onnx", signature)
    with file.with_exact_sums().predictor(1) as onnx_predict, model.predictor(1) as torch_predict:
        for shape in ((1, 1, 6), (3, 9, 6), (2, 40, 6)):
            inputs = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
            found, expected = onnx_predict(inputs), torch_predict(inputs)
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kind", "options"), [("GRU", {}), ("RNN", {}), ("LSTM", {}), ("LSTM", {"proj_size": 3})])
def test_a_sequence_in_no_batch(kind: str, options: dict[str, Any], batch_first: bool) -> None:
    layer = getattr(nn, kind)(6, 5, 2, bidirectional=True, batch_first=batch_first, **options)
    other = recurrent_replacements(nn.Sequential(layer), has_any_length=True)[layer]
    x_LI = torch.randn(7, 6)
    with torch.no_grad():
        expected, states = layer(x_LI)
        torch.testing.assert_close(other(x_LI), (expected, states))
        torch.testing.assert_close(other(x_LI, states), layer(x_LI, states))


class KeywordSpotter(nn.Module):
    """A convolution halves the frames in front of a recurrent layer: torch.export assumes that there are three."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, (2, 2), 1)
        self.recurrent, self.head = getattr(nn, kind)(12, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x_BLI: torch.Tensor) -> torch.Tensor:
        frames = self.conv(x_BLI.unsqueeze(1)).permute(0, 2, 1, 3).flatten(2)
        return self.head(self.recurrent(frames)[0].mean(1))


@builder
def keyword_spotter(*, kind: str) -> nn.Module:
    return KeywordSpotter(kind)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_frames_are_halved_in_front_of_a_recurrent_layer(kind: str, tmp_path) -> None:
    signature = Signature(
        (TensorSpec("x", "float32", (BATCH, "length", 6)),), (TensorSpec("y", "float32", (BATCH, 3)),)
    )
    with seeded(0):
        network = keyword_spotter(kind=kind)
    model = Model.from_module(Recipe(FunctionRef.to(keyword_spotter, kind=kind), signature), network)
    built = build_graph(model, opset=18).model
    graph.write(built, tmp_path / "model.onnx")
    file = OnnxFile(tmp_path / "model.onnx", signature)
    with file.predictor(1) as onnx_predict, model.predictor(1) as torch_predict:
        for length in (1, 2, 3, 16, 17):
            inputs = {"x": np.random.default_rng(0).normal(size=(2, length, 6)).astype(np.float32)}
            np.testing.assert_allclose(onnx_predict(inputs)["y"], torch_predict(inputs)["y"], rtol=1e-4, atol=1e-5)


class OwnLSTM(nn.LSTM):
    """A subclass, whose forward pass may be any."""


def test_what_may_compute_otherwise_is_refused_for_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes the steps of one length out, and its error is that a constant was made of the length."""
    monkeypatch.setattr(nn, "LSTM", OwnLSTM)
    signature = Signature(
        (TensorSpec("x", "float32", (BATCH, "length", 6)),), (TensorSpec("y", "float32", (BATCH, 3)),)
    )
    reference = FunctionRef.to(keyword_spotter, kind="LSTM")
    model = Model.from_module(Recipe(reference, signature), keyword_spotter(kind="LSTM"))
    with pytest.raises(StageError) as raised:
        build_graph(model, opset=18)
    assert str(raised.value) == (
        "this network can't be exported to ONNX: the steps of recurrent (OwnLSTM, float32) are written out, for one "
        "length: only nn.LSTM, nn.GRU and nn.RNN themselves, of float32, take any"
    )


def test_exporting_leaves_the_network_as_it_was(models: dict[str, Model]) -> None:
    from ptpipe_onnx import torch_exporter

    network = models["lstm"].build()
    lstm = network.lstm
    torch_exporter.export(network, models["lstm"].signature, 18)
    assert network.lstm is lstm
