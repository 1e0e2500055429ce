"""LSTM layers as ONNX's operator, for sequences of any length.

torch's exporter decomposes them into the steps of the sequence that it traces. So they are replaced, while a network is
exported, by calls of an operator of ours, which the exporter translates.

Shape legend: L steps, B samples, I inputs, S features of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

State: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def lstms_replaced(network: nn.Module) -> Iterator[None]:
    """Replace the LSTM layers of a network inside the `with`."""
    layers = {name: layer for name, layer in network.named_modules(remove_duplicate=False) if _has_operator(layer)}
    replacements = {layer: _Lstm(layer) for layer in layers.values()}
    for name, layer in layers.items():
        network.set_submodule(name, replacements[layer])
    try:
        yield
    finally:
        for name, layer in layers.items():
            network.set_submodule(name, layer)


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return what the exporter makes of the operator."""
    return {_operator()._opoverload: _translated}


def _has_operator(layer: nn.Module) -> bool:
    return type(layer) is nn.LSTM and layer.proj_size == 0 and layer.weight_ih_l0.dtype is torch.float32


class _Lstm(nn.Module):
    """Calls the operator for each layer and direction of an LSTM, whose weights it has in ONNX's order of gates."""

    def __init__(self, lstm: Any) -> None:
        super().__init__()
        self.batch_first, self.num_layers = lstm.batch_first, lstm.num_layers
        self.suffixes = ("", "_reverse") if lstm.bidirectional else ("",)
        for number, suffix in self._parts():
            of = f"l{number}{suffix}"
            for kind in ("ih", "hh"):
                self.register_buffer(f"weight_{kind}_{of}", _reordered(getattr(lstm, f"weight_{kind}_{of}"))[None])
            gates = 4 * lstm.hidden_size
            biases = [getattr(lstm, f"bias_{kind}_{of}") if lstm.bias else torch.zeros(gates) for kind in ("ih", "hh")]
            self.register_buffer(f"bias_{of}", torch.cat([_reordered(bias) for bias in biases])[None])

    def forward(self, x: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Return what an `nn.LSTM` does."""
        x_LBI = x.transpose(0, 1) if self.batch_first else x
        last = []
        for first in range(0, self.num_layers * len(self.suffixes), len(self.suffixes)):
            outputs_LBS = []
            for offset, suffix in enumerate(self.suffixes):
                of, place = f"l{first // len(self.suffixes)}{suffix}", first + offset
                hidden, cell = (None, None) if state is None else (part[place : place + 1] for part in state)
                tensors = (getattr(self, f"{name}_{of}") for name in ("weight_ih", "weight_hh", "bias"))
                y_LBS, *ends = _operator()(x_LBI, *tensors, hidden, cell, bool(suffix))
                outputs_LBS.append(y_LBS)
                last.append(ends)
            x_LBI = torch.cat(outputs_LBS, 2)
        hidden, cell = (torch.cat(parts) for parts in zip(*last, strict=True))
        return x_LBI.transpose(0, 1) if self.batch_first else x_LBI, (hidden, cell)

    def _parts(self) -> list[tuple[int, str]]:
        return [(number, suffix) for number in range(self.num_layers) for suffix in self.suffixes]


def _reordered(gates: torch.Tensor) -> torch.Tensor:
    i, f, c, o = gates.detach().chunk(4)
    return torch.cat([i, o, f, c])


@functools.cache
def _operator() -> Any:
    """Register the operator, of which the exporter needs the shapes alone."""

    def lstm(  # noqa: PLR0913  # those of an LSTM
        x: torch.Tensor,
        weight: torch.Tensor,
        recurrence: torch.Tensor,
        bias: torch.Tensor,
        hidden: torch.Tensor | None,
        cell: torch.Tensor | None,
        reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_features = recurrence.shape[2]
        state = (1, x.shape[1], num_features)
        return x.new_empty(x.shape[0], x.shape[1], num_features), x.new_empty(state), x.new_empty(state)

    lstm.__annotations__ = {
        **dict.fromkeys(("x", "weight", "recurrence", "bias"), torch.Tensor),
        **dict.fromkeys(("hidden", "cell"), torch.Tensor | None),
        "reverse": bool,
        "return": tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    }
    operator: Any = torch.library.custom_op("ptpipe::lstm", lstm, mutates_args=())
    operator.register_fake(lstm)
    return operator


def _translated(  # noqa: PLR0913  # those of the operator
    x: Any, weight: Any, recurrence: Any, bias: Any, hidden: Any, cell: Any, reverse: bool
) -> Any:
    from onnxscript import opset18 as op

    direction = "reverse" if reverse else "forward"
    size = recurrence.shape[2]
    y, *ends = op.LSTM(x, weight, recurrence, bias, None, hidden, cell, direction=direction, hidden_size=size)
    return op.Squeeze(y, op.Constant(value_ints=[1])), *ends
