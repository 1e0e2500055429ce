"""Dynamically quantized LSTM and GRU layers.

Shape legend: T steps, B sequences, I inputs, S features of the state.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ptpipe_torch.int8.engine import quantized_engine, supported_engines
from ptpipe_torch.int8.layers import int8_weight
from ptpipe_torch.int8.recurrent import DynamicRecurrent, recurrent_error

from ....processor import reduced

NUM_INPUTS, S, B, T = 12, 20, 5, 9
KINDS: list[dict[str, Any]] = [
    {"num_layers": 2, "bidirectional": True},
    {"bias": False, "batch_first": True},
    {"num_layers": 3, "bidirectional": True, "dropout": 0.5, "batch_first": True},
]
SCHEMES = [(True, False), (False, True), (True, True)]
"""Per channel or not, with narrow weights or not."""


def float_layer(type_: type[nn.RNNBase], **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type_(NUM_INPUTS, S, **options).eval()


def arguments(layer: nn.RNNBase, form: str) -> tuple[Any, Any]:
    """Return input and state."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return 2 * torch.randn(shape, generator=random)

    sequences = () if "unbatched" in form else (B,)
    x: Any = normal(B, T, NUM_INPUTS) if layer.batch_first and sequences else normal(T, *sequences, NUM_INPUTS)
    if "packed" in form:
        lengths = torch.tensor([3, 9, 1, 5, 9])
        x = pack_padded_sequence(x, lengths, batch_first=layer.batch_first, enforce_sorted=False)
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), *sequences, S)
    states = normal(*shape), normal(*shape)
    if "state" not in form:
        return x, None
    return x, states if layer.mode == "LSTM" else states[0]


def tensors_of(returned: Any) -> list[torch.Tensor]:
    output, last = returned
    data = output.data if isinstance(output, PackedSequence) else output
    return [data, *([last] if isinstance(last, torch.Tensor) else last)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", supported_engines())
@pytest.mark.parametrize("type_", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("form", ["batch", "batch state", "packed", "packed state", "unbatched", "unbatched state"])
def test_a_layer_differs_from_its_formula_by_rounding_alone(type_: type[nn.RNNBase], form: str, backend: str) -> None:
    for options, (per_channel, narrow) in zip(KINDS, SCHEMES, strict=True):
        layer = float_layer(type_, **options)
        x, state = arguments(layer, form)
        with quantized_engine(backend), torch.inference_mode():
            int8 = DynamicRecurrent(layer, per_channel=per_channel, narrow_weights=narrow or reduced(backend))
            returned, expected = int8(x, state), layer(x, state)
            assert recurrent_error(int8, returned, x, state) <= 1
            for index, (found, tensor) in enumerate(zip(tensors_of(returned), tensors_of(expected), strict=True)):
                assert found.shape == tensor.shape
                assert (found - tensor).abs().max() < 0.06 * tensor.abs().max()
                wrong = copy.deepcopy(returned)
                tensors_of(wrong)[index][-1].mul_(1.001)
                assert recurrent_error(int8, wrong, x, state) > 1


@pytest.mark.parametrize("backend", supported_engines())
def test_many_steps_and_sequences(backend: str) -> None:
    for type_ in (nn.LSTM, nn.GRU):
        layer = float_layer(type_, bidirectional=True, batch_first=True)
        x_BTI = torch.randn(30, 90, NUM_INPUTS, generator=torch.Generator().manual_seed(0))
        with quantized_engine(backend), torch.inference_mode():
            int8 = DynamicRecurrent(layer, per_channel=True, narrow_weights=reduced(backend))
            y_BTS, last = int8(x_BTI)
            assert recurrent_error(int8, (y_BTS, last), x_BTI) <= 1
            assert recurrent_error(int8, (y_BTS.flip(-1), last), x_BTI) > 1
            assert recurrent_error(int8, (y_BTS, last), x_BTI / 0) == 0, "it has no range"


@pytest.mark.parametrize("backend", supported_engines())
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("type_", [nn.LSTM, nn.GRU])
def test_the_state_dict_has_plain_weights(type_: type[nn.RNNBase], options: Any, backend: str) -> None:
    layer, other = float_layer(type_, **options), type_(NUM_INPUTS, S, **options).eval()
    x, state = arguments(layer, "batch state")
    with quantized_engine(backend), torch.inference_mode():
        int8, copied = (DynamicRecurrent(each, per_channel=True, narrow_weights=False) for each in (layer, other))
        expected = tensors_of(int8(x, state))
        assert not torch.equal(tensors_of(copied(x, state))[0], expected[0])
        copied.load_state_dict(int8.state_dict())
        assert all(map(torch.equal, tensors_of(copied(x, state)), expected))
        for name, (weight, bias) in int8.state_dict().items():
            rounded = int8_weight(layer.get_parameter(name).detach(), per_channel=True, axis=0)
            assert torch.equal(weight.int_repr(), rounded.int_repr())
            if layer.bias:
                assert torch.equal(bias, layer.get_parameter(name.replace("weight", "bias")))
            else:
                assert bias is None
        assert set(int8.state_dict()) == {name for name, _ in layer.named_parameters() if name.startswith("weight")}


def test_narrow_weights_have_seven_bits() -> None:
    layer = float_layer(nn.LSTM)
    for narrow, largest in ((False, 127), (True, 64)):
        weights = DynamicRecurrent(layer, per_channel=True, narrow_weights=narrow).weights
        found = {int(weight.int_repr().int().abs().max()) for weight, _ in weights.values()}
        assert found == {largest}
