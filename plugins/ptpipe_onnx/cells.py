"""Cells of recurrent layers, for batches of any size.

torch (2.13) decomposes them by code that makes a constant of the batch's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return what the exporter makes of the operators of `nn.LSTMCell` and `nn.GRUCell`."""
    return {torch.ops.aten.lstm_cell.default: _lstm_cell, torch.ops.aten.gru_cell.default: _gru_cell}


def _lstm_cell(x: Any, hx: Sequence[Any], w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Return the next hidden state and the next cell state; gates are i, f, c, o."""
    from onnxscript import opset18 as op

    hidden, cell = hx
    gates = op.Split(op.Add(_linear(x, w_ih, b_ih), _linear(hidden, w_hh, b_hh)), axis=1, num_outputs=4)
    into, kept, shown = (op.Sigmoid(gates[place]) for place in (0, 1, 3))
    cell = op.Add(op.Mul(kept, cell), op.Mul(into, op.Tanh(gates[2])))
    return op.Mul(shown, op.Tanh(cell)), cell


def _gru_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Return the next hidden state; gates are r, z, n."""
    from onnxscript import opset18 as op

    parts = [op.Split(values, axis=1, num_outputs=3) for values in (_linear(x, w_ih, b_ih), _linear(hx, w_hh, b_hh))]
    reset, kept = (op.Sigmoid(op.Add(one, other)) for one, other in list(zip(*parts, strict=True))[:2])
    new = op.Tanh(op.Add(parts[0][2], op.Mul(reset, parts[1][2])))
    return op.Add(op.Mul(op.Sub(hx, new), kept), new)


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    from onnxscript import opset18 as op

    return op.Gemm(x, weight, bias, transB=1)
