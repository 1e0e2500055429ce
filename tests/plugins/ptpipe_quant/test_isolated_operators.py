"""Operators between float layers, as those around the states of a streaming network.

Shape legend: B samples, L steps, C channels, H features of a state.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe_quant import ConvertConfig, PrepareConfig, PrepareQatConfig, convert, prepare, prepare_qat
from ptpipe_torch import BATCH, FunctionRef, Model, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.runtime import seeded

from .conftest import BACKENDS

STEPS = {
    "moved": lambda network, state_BH: state_BH.unsqueeze(0).contiguous(),
    "computed": lambda network, state_BH: (state_BH + torch.sigmoid(state_BH) * state_BH).unsqueeze(0),
    "normalized": lambda network, state_BH: network.norm(state_BH).unsqueeze(0),
}
SIGNATURE = Signature(
    (TensorSpec("signal", "float32", (BATCH, "length", 6)), TensorSpec("state", "float32", (BATCH, 8))),
    (TensorSpec("logits", "float32", (BATCH, "length", 3)), TensorSpec("next_state", "float32", (BATCH, 8))),
)


class Streaming(nn.Module):
    """A recurrent layer that goes on from a state, and a layer behind it."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step
        self.norm, self.gru, self.head = nn.LayerNorm(8), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, signal_BLC: torch.Tensor, state_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output_BLH, last = self.gru(signal_BLC, STEPS[self.step](self, state_BH))
        return self.head(torch.relu(output_BLH)), last.squeeze(0)


@builder
def streaming(step: str) -> nn.Module:
    return Streaming(step)


def prepared_static(ctx: Context, model: Model) -> Model:
    return prepare(PrepareConfig(backend=BACKENDS[0]), ctx, model)


def prepared_for_training(ctx: Context, model: Model) -> Model:
    return prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, model)


@pytest.mark.parametrize("preparation", [prepared_static, prepared_for_training])
@pytest.mark.parametrize("step", STEPS)
def test_states_are_as_exact_as_the_float_layer(
    step: str, preparation: Callable[[Context, Model], Model], tmp_path
) -> None:
    ctx = Context("int8", "quant.test", 7, tmp_path)
    with seeded(0):
        network = streaming(step).eval()
        inputs = torch.randn(16, 5, 6), torch.randn(16, 8)
    model = Model.from_module(Recipe(FunctionRef.to(streaming, step=step), SIGNATURE), network)
    prepared = preparation(ctx, model)
    observed = prepared.build_prepared().train(preparation is prepared_for_training)
    with torch.no_grad():
        observed(*inputs)
        int8 = convert(ConvertConfig(), ctx, prepared.with_state_dict_of(observed.eval())).build()
        network.gru.load_state_dict(int8.gru.state_dict())  # whose stored weights are rounded
        far = inputs[0], 4 * inputs[1]  # as no calibration has seen it
        (expected, expected_state), (found, found_state) = network(*far), int8(*far)
    torch.testing.assert_close(found_state, expected_state)
    assert not torch.equal(found, expected), "the layer behind it is int8"
