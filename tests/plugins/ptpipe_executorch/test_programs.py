"""Programs of sequences, of recurrent layers, and of several outputs.

Shape legend: B samples, L tokens; N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_executorch import ExecuTorchConfig, ExecuTorchModel, export_executorch
from ptpipe_executorch.export import _network
from ptpipe_executorch.xnnpack import lower
from ptpipe_torch import BATCH, FunctionRef, Model, Recipe, Signature, TensorSpec
from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.runtime import seeded

from ...texts import TAGS, network_of, quantized, text_data, texts, trained
from ..ptpipe_onnx.test_several_inputs import SIGNATURE, house, inputs, int8, model, named_house, outputs_of
from .test_networks import STEPS, Reader

pytest.importorskip("executorch", reason="ExecuTorch is not installed: pip install 'ptpipe[executorch]'")

__all__ = ["inputs", "model"]  # fixtures
MAX_LENGTH = 12
STEP = 0.0186
MEAN = methodcaller("mean", (2, 3))


def program(model: Model, folder: Path, max_batch_size: int) -> ExecuTorchModel:
    """Lower a model for whose signature no data set is there."""
    network = _network(model)
    lowered = lower(network.module, model.signature, {BATCH: max_batch_size})
    path = folder / "model.pte"
    path.write_bytes(lowered.content)
    return ExecuTorchModel(path, model.signature, network.precision, lowered.outputs, max_batch_size)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "task"), [("float", None), ("dynamic", TAGS), ("static", TAGS)])
def test_sequences_of_every_length_up_to_the_largest(path, task, tmp_path, events) -> None:
    """Of a class for each text, and for each token."""
    data = text_data(max_length=MAX_LENGTH) if task is None else text_data(task, max_length=MAX_LENGTH)
    ctx = Context("mobile", "export.executorch", 7, tmp_path, _tell=events.append)
    name = "transformer" if task is None else "causal"
    model = trained(network_of(name, data, ctx), data)
    model = model if path == "float" else quantized(model, data, ctx, "fbgemm", path)
    config = ExecuTorchConfig(max_length=MAX_LENGTH, max_batch_size=4, num_samples=32)
    file = export_executorch(config, ctx, model, data)
    assert events.metrics["delegation"] == "7 of 7 linear layers" and events.metrics["top1_agreement"] >= 0.98
    ids_BL = texts(5, 9, max_length=MAX_LENGTH)
    with file.predictor(1) as predict, model.predictor(1) as torch_predict:
        for length in (1, 7, MAX_LENGTH):
            for size in (1, 5):  # the second one in pieces
                tokens = {"tokens": np.ascontiguousarray(ids_BL[:size, :length])}
                found, expected = predict(tokens)["logits"], torch_predict(tokens)["logits"]
                assert np.abs(found - expected).max() <= (1e-5 if path == "float" else 0.05) * np.ptp(expected)
        longer = r"with tokens of shape \(1, 13\), where \(4, 12\) is the largest: .* a larger max_length$"
        with pytest.raises(StageError, match=rf"^ExecuTorch can't run model\.pte {longer}"):
            predict({"tokens": np.ones((1, MAX_LENGTH + 1), np.int64)})


@pytest.mark.slow
def test_texts_longer_than_max_length_end_the_export_with_the_remedy(tmp_path) -> None:
    data = text_data(max_length=MAX_LENGTH)
    ctx = Context("mobile", "export.executorch", 7, tmp_path)
    model = network_of("transformer", data, ctx)
    with pytest.raises(
        StageError, match=r"where \(64, 5\) is the largest: give export\.executorch a larger max_length"
    ):
        export_executorch(ExecuTorchConfig(max_length=5, num_samples=16), ctx, model, data)


def test_recurrent_layers_of_single_samples(tmp_path) -> None:
    kinds = (nn.LSTM, nn.GRU)
    with seeded(0):
        network = Reader(*kinds).eval()
    lowered = lower(network, STEPS, {BATCH: 1})
    path = tmp_path / "model.pte"
    path.write_bytes(lowered.content)
    x = np.random.default_rng(0).normal(size=(5, 6, 16)).astype(np.float32)
    with ExecuTorchModel(path, STEPS, "float32", lowered.outputs, 1).predictor(1) as predict, torch.no_grad():
        np.testing.assert_allclose(predict({"x": x})["y"], network(torch.from_numpy(x)), atol=1e-5)


@pytest.mark.parametrize("build", [house, named_house])
@pytest.mark.parametrize("path", ["float", "dynamic", "static", "qat"])
def test_two_outputs_keep_their_names(path, build, inputs, tmp_path) -> None:
    """Also where a network returns them in another order."""
    with seeded(0):
        model = Model.from_module(Recipe(FunctionRef.to(build), SIGNATURE), build())
    if path != "float":
        model = int8(model, inputs, Context("int8", "quant", 7, tmp_path), "fbgemm", path)
    found, expected = outputs_of(program(model, tmp_path, 16), inputs), outputs_of(model, inputs)
    assert list(found) == ["price", "features"]
    for name, values in expected.items():
        allowed = {"float": 1e-5, "dynamic": 0.03}.get(path, 1e-6)
        assert np.abs(found[name] - values).max() <= allowed * np.ptp(values)


class Mean(nn.Module):
    """The rounded mean of rounded pictures."""

    def __init__(self, zero_point: int, mean: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.grid, self.mean = (STEP, zero_point, -128, 127, torch.int8), mean

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        rounded_NCHW = DEQUANTIZE(QUANTIZE(x_NCHW, *self.grid), *self.grid)
        return DEQUANTIZE(QUANTIZE(self.mean(rounded_NCHW), *self.grid), *self.grid)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("zero_point", [-127, -17, 0, 127])
@pytest.mark.parametrize("mean", [MEAN, nn.AdaptiveAvgPool2d(1)], ids=["mean", "pooling"])
def test_ties_of_means_become_an_even_number_of_steps(mean, zero_point, size, tmp_path) -> None:
    """As in torch's int8 networks, which `ptpipe_torch.int8.ties` lets round so."""
    shape = (BATCH, 8) if mean is MEAN else (BATCH, 8, 1, 1)
    signature = Signature((TensorSpec("x", "float32", (BATCH, 8, size, size)),), (TensorSpec("y", "float32", shape),))
    lowered = lower(Mean(zero_point, mean).eval(), signature, {BATCH: 512})
    assert [(operator.type, operator.precision) for operator in lowered.operators][:1] == [("mean", "int8")]
    path = tmp_path / "model.pte"
    path.write_bytes(lowered.content)
    steps_NCHW = np.random.default_rng(0).integers(-128 - zero_point, 128 - zero_point, (512, 8, size, size))
    with ExecuTorchModel(path, signature, "int8", lowered.outputs, 512).predictor(1) as predict:
        y = predict({"x": (steps_NCHW * STEP).astype(np.float32)})["y"]
    means_NC = steps_NCHW.mean((2, 3))
    assert (means_NC % 1 == 0.5).any() == (size != 3)
    assert np.array_equal(np.round(y.reshape(512, 8) / STEP), np.round(means_NC))
