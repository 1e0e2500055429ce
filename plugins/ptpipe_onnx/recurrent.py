"""LSTM and GRU layers as ONNX's operators, for sequences of any length.

torch's exporter decomposes them into the steps of the sequence that it traces. So they are replaced, while a network is
exported, by calls of operators of ours, which the exporter translates.

Shape legend: L steps, B samples, I inputs, S features of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

State: TypeAlias = tuple[torch.Tensor, ...] | torch.Tensor
"""Hidden state and cell state of an LSTM, the hidden state of a GRU."""

GATE_ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""Which of torch's gates each of ONNX's is: i, o, f, c of i, f, c, o; z, r, h of r, z, h."""


def recurrent_replacements(network: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return what calls the operators, for each LSTM and GRU layer inside a network."""
    layers = (layer for layer in network.modules() if layer is not network and _has_operator(layer))
    return {layer: _Recurrent(layer) for layer in layers}


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return what the exporter makes of the operators."""
    return {_lstm()._opoverload: _translated_lstm, _gru()._opoverload: _translated_gru}


def _has_operator(layer: nn.Module) -> bool:
    is_known = type(layer) is nn.GRU or (type(layer) is nn.LSTM and layer.proj_size == 0)
    return is_known and layer.weight_ih_l0.dtype is torch.float32


class _Recurrent(nn.Module):
    """Calls the operator for each layer and direction, whose weights it has in ONNX's order of gates."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.mode, self.batch_first, self.num_layers = layer.mode, layer.batch_first, layer.num_layers
        self.suffixes = ("", "_reverse") if layer.bidirectional else ("",)
        order = GATE_ORDERS[layer.mode]
        for number, suffix in self._parts():
            of = f"l{number}{suffix}"
            for kind in ("ih", "hh"):
                weight = getattr(layer, f"weight_{kind}_{of}").detach()
                self.register_buffer(f"weight_{kind}_{of}", _reordered(weight, order)[None])
            zeros = torch.zeros(len(order) * layer.hidden_size)
            biases = [getattr(layer, f"bias_{kind}_{of}").detach() if layer.bias else zeros for kind in ("ih", "hh")]
            self.register_buffer(f"bias_{of}", torch.cat([_reordered(bias, order) for bias in biases])[None])

    def forward(self, input: torch.Tensor, hx: State | None = None) -> tuple[torch.Tensor, State]:
        """Return what the layer does. Raises TypeError for a packed sequence."""
        if not isinstance(input, torch.Tensor):
            raise TypeError("packed sequences have no ONNX form; call the layer with the padded one")
        x_LBI = input.transpose(0, 1) if self.batch_first else input
        operator = _lstm() if self.mode == "LSTM" else _gru()
        absent = [None] * (2 if self.mode == "LSTM" else 1)
        states = absent if hx is None else [hx] if isinstance(hx, torch.Tensor) else hx
        last: list[Sequence[torch.Tensor]] = []
        for first in range(0, self.num_layers * len(self.suffixes), len(self.suffixes)):
            outputs_LBS = []
            for offset, suffix in enumerate(self.suffixes):
                of, place = f"l{first // len(self.suffixes)}{suffix}", first + offset
                initial = (None if state is None else state[place : place + 1] for state in states)
                tensors = (getattr(self, f"{name}_{of}") for name in ("weight_ih", "weight_hh", "bias"))
                y_LBS, *ends = operator(x_LBI, *tensors, *initial, bool(suffix))
                outputs_LBS.append(y_LBS)
                last.append(ends)
            x_LBI = torch.cat(outputs_LBS, 2)
        hidden, *cell = (torch.cat(parts) for parts in zip(*last, strict=True))
        return x_LBI.transpose(0, 1) if self.batch_first else x_LBI, (hidden, *cell) if cell else hidden

    def _parts(self) -> list[tuple[int, str]]:
        return [(number, suffix) for number in range(self.num_layers) for suffix in self.suffixes]


def _reordered(gates: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    parts = gates.chunk(len(order))
    return torch.cat([parts[place] for place in order])


@functools.cache
def _lstm() -> Any:
    """Register the operator of an LSTM."""

    def lstm(  # noqa: PLR0913  # those of an LSTM
        x: torch.Tensor,
        weight: torch.Tensor,
        recurrence: torch.Tensor,
        bias: torch.Tensor,
        hidden: torch.Tensor | None,
        cell: torch.Tensor | None,
        reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, *states = _results(x, recurrence, 2)
        if hidden is not None and cell is not None:
            states = [hidden, cell]
        parameters = _parameters(weight, recurrence, bias, GATE_ORDERS["LSTM"])
        y, hidden, cell = _computed(torch.lstm, x, states, parameters, reverse)
        return y, hidden, cell

    return _registered("ptpipe::lstm", lstm, ("hidden", "cell"))


@functools.cache
def _gru() -> Any:
    """Register the operator of a GRU."""

    def gru(  # those of a GRU
        x: torch.Tensor,
        weight: torch.Tensor,
        recurrence: torch.Tensor,
        bias: torch.Tensor,
        hidden: torch.Tensor | None,
        reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = _results(x, recurrence, 1)[1] if hidden is None else hidden
        y, last = _computed(torch.gru, x, state, _parameters(weight, recurrence, bias, GATE_ORDERS["GRU"]), reverse)
        return y, last

    return _registered("ptpipe::gru", gru, ("hidden",))


def _results(x: torch.Tensor, recurrence: torch.Tensor, num_states: int) -> tuple[torch.Tensor, ...]:
    """Return zeros of the shapes of the outputs and the last states."""
    num_features = recurrence.shape[2]
    states = (x.new_zeros(1, x.shape[1], num_features) for _ in range(num_states))
    return x.new_zeros(x.shape[0], x.shape[1], num_features), *states


def _parameters(
    weight: torch.Tensor, recurrence: torch.Tensor, bias: torch.Tensor, order: Sequence[int]
) -> list[torch.Tensor]:
    """Return the parameters of a layer of torch's, whose gates have another order."""
    original = [order.index(place) for place in range(len(order))]
    return [_reordered(part, original) for part in (weight[0], recurrence[0], *bias[0].chunk(2))]


def _computed(
    function: Any, x: torch.Tensor, states: Any, parameters: Sequence[torch.Tensor], reverse: bool
) -> tuple[torch.Tensor, ...]:
    """Compute what torch does: an exported program is compared with its network where sizes decide a branch."""
    y, *last = function(x.flip(0) if reverse else x, states, parameters, True, 1, 0.0, False, False, False)
    return y.flip(0) if reverse else y, *last


def _registered(name: str, function: Any, states: Sequence[str]) -> Any:
    function.__annotations__ = {
        **dict.fromkeys(("x", "weight", "recurrence", "bias"), torch.Tensor),
        **dict.fromkeys(states, torch.Tensor | None),
        "reverse": bool,
        "return": tuple.__class_getitem__((torch.Tensor,) * (1 + len(states))),
    }
    operator: Any = torch.library.custom_op(name, function, mutates_args=())
    operator.register_fake(lambda x, _weight, recurrence, *_: _results(x, recurrence, len(states)))
    return operator


def _translated_lstm(  # noqa: PLR0913  # those of the operator
    x: Any, weight: Any, recurrence: Any, bias: Any, hidden: Any, cell: Any, reverse: bool
) -> Any:
    from onnxscript import opset18 as op

    direction = "reverse" if reverse else "forward"
    size = recurrence.shape[2]
    y, *ends = op.LSTM(x, weight, recurrence, bias, None, hidden, cell, direction=direction, hidden_size=size)
    return op.Squeeze(y, op.Constant(value_ints=[1])), *ends


def _translated_gru(  # those of the operator
    x: Any, weight: Any, recurrence: Any, bias: Any, hidden: Any, reverse: bool
) -> Any:
    from onnxscript import opset18 as op

    options = {"direction": "reverse" if reverse else "forward", "hidden_size": recurrence.shape[2]}
    y, last = op.GRU(x, weight, recurrence, bias, None, hidden, linear_before_reset=1, **options)
    return op.Squeeze(y, op.Constant(value_ints=[1])), last
