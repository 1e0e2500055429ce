"""What export.executorch makes of networks before ExecuTorch sees them, and which it refuses: needs no ExecuTorch."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_executorch.export import _network
from ptpipe_executorch.xnnpack import lower
from ptpipe_quant import stages
from ptpipe_quant.config import DynamicConfig
from ptpipe_torch import BATCH, FunctionRef, Model, Recipe, Signature, TensorSpec
from ptpipe_torch.runtime import seeded

from ...texts import network_of, quantized, text_data
from ..ptpipe_onnx.test_several_inputs import SIGNATURE, house, inputs, int8, model, named_house

__all__ = ["inputs", "model"]  # fixtures
STEPS = Signature((TensorSpec("x", "float32", (BATCH, 6, 16)),), (TensorSpec("y", "float32", (BATCH, 10)),))


class Reader(nn.Module):
    """Reads so many steps in two layers."""

    def __init__(self, first: type[nn.RNNBase], second: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.second = first(16, 8, batch_first=True), second(8, 8, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)[0])[0][:, -1])


@pytest.fixture(scope="module")
def words():
    return text_data(max_length=20)


@pytest.fixture(scope="module")
def lstm(words, tmp_path_factory) -> Model:
    return network_of("lstm", words, Context("net", "model.test", 7, tmp_path_factory.mktemp("lstm")))


@pytest.mark.parametrize("path", ["float", "static"])
def test_recurrent_layers_of_texts_are_refused_by_name(path, lstm, words, tmp_path) -> None:
    """Static quantization leaves them float."""
    ctx = Context("int8", "quant.test", 7, tmp_path)
    network = lstm if path == "float" else quantized(lstm, words, ctx, "fbgemm", path)
    expected = r"lstm \(LSTM\): ExecuTorch unrolls .* sequences, and the axis length may have any: use export\.onnx"
    with pytest.raises(StageError, match=f"^{expected}"):
        lower(_network(network).module, lstm.signature, {BATCH: 1, "length": 20})


@pytest.mark.parametrize("kinds", [(nn.LSTM, nn.GRU), (nn.GRU, nn.RNN)])
def test_recurrent_layers_of_batches_are_refused_by_name(kinds) -> None:
    first, second = (kind.__name__ for kind in kinds)
    expected = (
        f"first ({first}), second ({second}): ExecuTorch unrolls recurrent layers, which fixes the size of batches"
    )
    with pytest.raises(StageError, match=f"^{re.escape(expected)}: set max_batch_size: 1$"):
        lower(Reader(*kinds).eval(), STEPS, {BATCH: 8})


def test_int8_recurrent_layers_are_refused_by_name(lstm, tmp_path) -> None:
    small = stages.dynamic(DynamicConfig(backend="fbgemm"), Context("int8", "quant.dynamic", 7, tmp_path), lstm)
    with pytest.raises(StageError, match=r"^lstm: XNNPACK has no recurrent layers in int8: leave them float \(`skip`"):
        _network(small)


@pytest.mark.parametrize("build", [house, named_house])
def test_the_steps_of_two_outputs_are_known_by_name(build, inputs, tmp_path) -> None:
    """Also where a network returns them in another order."""
    with seeded(0):
        model = Model.from_module(Recipe(FunctionRef.to(build), SIGNATURE), build())
    network = _network(int8(model, inputs, Context("int8", "quant", 7, tmp_path), "fbgemm", "static"))
    assert network.precision == "int8" and set(network.steps) == {"price", "features"}
    with torch.no_grad():
        returned = network.module(*(torch.from_numpy(inputs[spec.name]) for spec in SIGNATURE.inputs))
    values = returned if isinstance(returned, dict) else dict(zip(("price", "features"), returned, strict=True))
    for name, step in network.steps.items():
        integers = values[name] / step
        assert integers.round().unique().numel() > 3
        torch.testing.assert_close(integers, integers.round(), atol=1e-3, rtol=0)
