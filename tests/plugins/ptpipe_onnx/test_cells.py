"""Cells of recurrent layers, called in a loop, as ONNX files for batches of any size.

Shape legend: N samples, L steps, C channels, H features of a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe_onnx import graph
from ptpipe_onnx.export import build_graph
from ptpipe_torch import BATCH, FunctionRef, Model, OnnxFile, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.runtime import seeded

NUM_STEPS = 3
SIGNATURE = Signature(
    (TensorSpec("signal", "float32", (BATCH, NUM_STEPS, 6)),), (TensorSpec("states", "float32", (BATCH, NUM_STEPS, 5)),)
)


class Looping(nn.Module):
    """Feeds each step, and what the state says of it, to a cell that begins with zeros."""

    def __init__(self, cell: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.cell, self.feedback = getattr(nn, cell)(6, 5, **options), nn.Linear(5, 6)

    def forward(self, signal_NLC: torch.Tensor) -> torch.Tensor:
        hidden_NH = signal_NLC.new_zeros(signal_NLC.shape[0], 5)
        state: Any = (hidden_NH, hidden_NH) if isinstance(self.cell, nn.LSTMCell) else hidden_NH
        states = []
        for step_NC in signal_NLC.unbind(1):
            state = self.cell(step_NC + self.feedback(hidden_NH), state)
            hidden_NH = state[0] if isinstance(state, tuple) else state
            states.append(hidden_NH)
        return torch.stack(states, 1)


@builder
def looping(cell: str, options: dict[str, Any]) -> nn.Module:
    return Looping(cell, options)


@pytest.mark.parametrize(
    ("cell", "options"), [("LSTMCell", {}), ("LSTMCell", {"bias": False}), ("GRUCell", {}), ("RNNCell", {})]
)
def test_cells_take_batches_of_any_size(cell: str, options: dict[str, Any], tmp_path) -> None:
    reference = FunctionRef.to(looping, cell=cell, options=options)
    with seeded(0):
        model = Model.from_module(Recipe(reference, SIGNATURE), looping(**reference.arguments))
    built = build_graph(model, opset=18).model
    graph.set_shapes(built.graph, SIGNATURE)
    graph.write(built, tmp_path / "model.onnx")
    file = OnnxFile(tmp_path / "model.onnx", SIGNATURE)
    with file.predictor(1) as predict, model.predictor(1) as predict_in_torch:
        for num_samples in (1, 2, 5):
            signal_NLC = np.random.default_rng(0).normal(size=(num_samples, NUM_STEPS, 6)).astype(np.float32)
            found, expected = (of({"signal": signal_NLC})["states"] for of in (predict, predict_in_torch))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
