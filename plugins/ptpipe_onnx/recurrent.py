"""Recurrent layers as ONNX's operators, for sequences of any length.

torch's exporter decomposes them into the steps of the sequence that it traces. So they are replaced, while a network is
exported, by calls of operators of ours, which the exporter translates.

Shape legend: L steps, B samples, I inputs, S features of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ptpipe_onnx import projected_lstm
from ptpipe_onnx.recurrent_operators import GATE_ORDERS, operator_of, reordered

State: TypeAlias = tuple[torch.Tensor, ...] | torch.Tensor
"""Hidden state and cell state of an LSTM, the hidden state of others."""

_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)


def recurrent_replacements(network: nn.Module, *, has_any_length: bool) -> dict[nn.Module, nn.Module]:
    """Return what calls the operators, for each recurrent layer inside a network.

    `has_any_length`: False keeps `nn.RNN`, whose steps ONNX Runtime computes a third as fast in its own operator.
    """
    types = _LAYERS if has_any_length else (nn.LSTM, nn.GRU)
    layers = (layer for layer in network.modules() if layer is not network and _has_operator(layer, types))
    return {layer: _Recurrent(layer) for layer in layers}


def written_out(network: nn.Module) -> str | None:
    """Return why a network takes one length alone, where a recurrent layer is none of those that were replaced."""
    layers = (named for named in network.named_modules() if isinstance(named[1], nn.RNNBase))
    name, layer = next(layers, ("", None))
    if layer is None:
        return None
    dtype = str(layer.weight_ih_l0.dtype).removeprefix("torch.")
    return (
        f"the steps of {name or 'the network'} ({type(layer).__name__}, {dtype}) are written out, for one length: "
        "only nn.LSTM, nn.GRU and nn.RNN themselves, of float32, take any"
    )


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return what the exporter makes of the operators."""
    functions: Mapping[tuple[str, bool], Callable[..., Any]] = {
        ("LSTM", False): _translated_lstm,
        ("LSTM", True): projected_lstm.translated,
        ("GRU", False): _translation("GRU", linear_before_reset=1),
        ("RNN_TANH", False): _translation("RNN", activations=["Tanh"]),
        ("RNN_RELU", False): _translation("RNN", activations=["Relu"]),
    }
    return {operator_of(*kind)._opoverload: function for kind, function in functions.items()}


def _has_operator(layer: nn.Module, types: Sequence[type[nn.RNNBase]]) -> bool:
    return type(layer) in types and layer.weight_ih_l0.dtype is torch.float32


class _Recurrent(nn.Module):
    """Calls the operator for each layer and direction, whose weights it has in ONNX's order of gates."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.mode, self.batch_first, self.num_layers = layer.mode, layer.batch_first, layer.num_layers
        self.suffixes = ("", "_reverse") if layer.bidirectional else ("",)
        self.is_projected = layer.proj_size > 0
        order = GATE_ORDERS[layer.mode]
        for number, suffix in self._parts():
            of = f"l{number}{suffix}"
            for kind in ("ih", "hh"):
                weight = getattr(layer, f"weight_{kind}_{of}").detach()
                self.register_buffer(f"weight_{kind}_{of}", reordered(weight, order)[None])
            zeros = torch.zeros(len(order) * layer.hidden_size)
            biases = [getattr(layer, f"bias_{kind}_{of}").detach() if layer.bias else zeros for kind in ("ih", "hh")]
            self.register_buffer(f"bias_{of}", torch.cat([reordered(bias, order) for bias in biases])[None])
            if self.is_projected:
                self.register_buffer(f"weight_hr_{of}", getattr(layer, f"weight_hr_{of}").detach())

    def forward(self, input: torch.Tensor, hx: State | None = None) -> tuple[torch.Tensor, State]:
        """Return what the layer does. Raises TypeError for a packed sequence."""
        if not isinstance(input, torch.Tensor):
            raise TypeError("packed sequences have no ONNX form; call the layer with the padded one")
        if input.dim() == 2:
            return self._of_one(input, hx)
        x_LBI = input.transpose(0, 1) if self.batch_first else input
        operator = operator_of(self.mode, self.is_projected)
        names = ("weight_ih", "weight_hh", "bias", *(["weight_hr"] if self.is_projected else []))
        absent = [None] * (2 if self.mode == "LSTM" else 1)
        states = absent if hx is None else [hx] if isinstance(hx, torch.Tensor) else hx
        last: list[Sequence[torch.Tensor]] = []
        for first in range(0, self.num_layers * len(self.suffixes), len(self.suffixes)):
            outputs_LBS = []
            for offset, suffix in enumerate(self.suffixes):
                of, place = f"l{first // len(self.suffixes)}{suffix}", first + offset
                initial = (None if state is None else state[place : place + 1] for state in states)
                tensors = (getattr(self, f"{name}_{of}") for name in names)
                y_LBS, *ends = operator(x_LBI, *tensors, *initial, bool(suffix))
                outputs_LBS.append(y_LBS)
                last.append(ends)
            x_LBI = torch.cat(outputs_LBS, 2)
        hidden, *cell = (torch.cat(parts) for parts in zip(*last, strict=True))
        return x_LBI.transpose(0, 1) if self.batch_first else x_LBI, (hidden, *cell) if cell else hidden

    def _of_one(self, x_LI: torch.Tensor, hx: State | None) -> tuple[torch.Tensor, State]:
        """Return what the layer does with a sequence that is in no batch."""
        axis = 0 if self.batch_first else 1
        states = hx.unsqueeze(1) if isinstance(hx, torch.Tensor) else hx and tuple(state.unsqueeze(1) for state in hx)
        y, last = self(x_LI.unsqueeze(axis), states)
        return y.squeeze(axis), last.squeeze(1) if isinstance(last, torch.Tensor) else tuple(
            of.squeeze(1) for of in last
        )

    def _parts(self) -> list[tuple[int, str]]:
        return [(number, suffix) for number in range(self.num_layers) for suffix in self.suffixes]


def _translated_lstm(  # noqa: PLR0913  # those of the operator
    x: Any, weight: Any, recurrence: Any, bias: Any, hidden: Any, cell: Any, reverse: bool
) -> Any:
    from onnxscript import opset18 as op

    direction = "reverse" if reverse else "forward"
    size = recurrence.shape[2]
    y, *ends = op.LSTM(x, weight, recurrence, bias, None, hidden, cell, direction=direction, hidden_size=size)
    return op.Squeeze(y, op.Constant(value_ints=[1])), *ends


def _translation(op_type: str, **attributes: Any) -> Callable[..., Any]:
    """Return what the exporter makes of the operator of a layer with one state."""

    def translated(  # those of the operator
        x: Any, weight: Any, recurrence: Any, bias: Any, hidden: Any, reverse: bool
    ) -> Any:
        from onnxscript import opset18 as op

        options = {"direction": "reverse" if reverse else "forward", "hidden_size": recurrence.shape[2], **attributes}
        y, last = getattr(op, op_type)(x, weight, recurrence, bias, None, hidden, **options)
        return op.Squeeze(y, op.Constant(value_ints=[1])), last

    return translated
