"""Operators that stand for one direction of a recurrent layer while a network is exported.

Shape legend: L steps, B samples, I inputs, S features of the state, P of a projected one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

GATE_ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}
"""Which of torch's gates each of ONNX's is: i, o, f, c of i, f, c, o; z, r, h of r, z, h. By `mode` of layers."""
_FUNCTIONS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
_WEIGHTS = ("x", "weight", "recurrence", "bias")


def reordered(gates: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return what a layer has for each gate, in another order: of each, which of the former ones it is."""
    parts = gates.chunk(len(order))
    return torch.cat([parts[place] for place in order])


@functools.cache
def operator_of(mode: str, is_projected: bool) -> Any:
    """Register the operator of a layer of this `mode`. `is_projected`: whether it projects its state (`proj_size`)."""
    if is_projected:
        return _projected_lstm()
    return _lstm() if mode == "LSTM" else _one_state(mode)


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
        weights, states = (weight, recurrence, bias), (hidden, cell)
        y, hidden, cell = _computed("LSTM", x, weights, states, reverse)
        return y, hidden, cell

    return _registered("LSTM", lstm)


def _projected_lstm() -> Any:
    """Register the operator of an LSTM whose hidden state is projected (`proj_size`)."""

    def projected_lstm(  # noqa: PLR0913  # those of an LSTM
        x: torch.Tensor,
        weight: torch.Tensor,
        recurrence: torch.Tensor,
        bias: torch.Tensor,
        projection: torch.Tensor,
        hidden: torch.Tensor | None,
        cell: torch.Tensor | None,
        reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, states = (weight, recurrence, bias, projection), (hidden, cell)
        y, hidden, cell = _computed("LSTM", x, weights, states, reverse)
        return y, hidden, cell

    return _registered("LSTM", projected_lstm, (*_WEIGHTS, "projection"))


def _one_state(mode: str) -> Any:
    """Register the operator of other layers, whose state is their last output."""

    def recurrent(  # those of such a layer
        x: torch.Tensor,
        weight: torch.Tensor,
        recurrence: torch.Tensor,
        bias: torch.Tensor,
        hidden: torch.Tensor | None,
        reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, last = _computed(mode, x, (weight, recurrence, bias), (hidden,), reverse)
        return y, last

    return _registered(mode, recurrent)


def _registered(mode: str, function: Any, weights: Sequence[str] = _WEIGHTS) -> Any:
    states = ("hidden", "cell") if mode == "LSTM" else ("hidden",)
    function.__annotations__ = {
        **dict.fromkeys(weights, torch.Tensor),
        **dict.fromkeys(states, torch.Tensor | None),
        "reverse": bool,
        "return": tuple.__class_getitem__((torch.Tensor,) * (1 + len(states))),
    }

    def empty(x: torch.Tensor, weight: torch.Tensor, recurrence: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        initial = _zeros(mode, x, recurrence)
        return x.new_zeros(x.shape[0], *initial[0].shape[1:]), *initial

    name = function.__name__ if mode == "LSTM" else mode.lower()
    operator: Any = torch.library.custom_op(f"ptpipe::{name}", function, mutates_args=())
    operator.register_fake(empty)
    return operator


def _zeros(mode: str, x: torch.Tensor, recurrence: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the states that a layer begins with: of an LSTM, the projected one is narrower than that of the cell."""
    _, num_rows, num_features = recurrence.shape
    sizes = (num_features, num_rows // len(GATE_ORDERS[mode]))[: 2 if mode == "LSTM" else 1]
    return tuple(x.new_zeros(1, x.shape[1], size) for size in sizes)


def _computed(
    mode: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor | None],
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    """Compute what torch does: an exported program is compared with its network where sizes decide a branch."""
    weight, recurrence, bias, *projection = weights
    initial: Any = _zeros(mode, x, recurrence) if states[0] is None else states
    order = GATE_ORDERS[mode]
    original = [order.index(place) for place in range(len(order))]
    parameters = [reordered(part, original) for part in (weight[0], recurrence[0], *bias[0].chunk(2))] + projection
    function: Any = _FUNCTIONS[mode]
    given = x.flip(0) if reverse else x
    y, *last = function(given, initial if mode == "LSTM" else initial[0], parameters, True, 1, 0.0, False, False, False)
    return y.flip(0) if reverse else y, *last
