"""The range in which the readers of a tensor tell its values apart.

HardSwish is 0 for all values below -3, and an int8 sigmoid 255 / 256 for all above 5.2. A grid that covers more has
larger steps, and nothing for it: observers see what is beyond such a limit as the limit.
"""

from __future__ import annotations

import math
import operator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.int8.observers import (
    fixed_grid,
    mix_in,
    observer_at,
    observer_calls,
    observes_activation_range,
    operator_at,
)
from ptpipe_torch.int8.value_counts import EVERYTHING, CountingObserver

Range: TypeAlias = tuple[float, float]

F = nn.functional
_ZERO_GATE = -6.5
"""Below -ln(511) = -6.24, a sigmoid is less than half a step of its grid, 1 / 256."""
_GATES: tuple[Any, ...] = (torch.sigmoid, F.sigmoid, "sigmoid", nn.Sigmoid)
_PRODUCTS: tuple[Any, ...] = (torch.mul, operator.mul, "mul")
_ROUNDED: dict[Range, tuple[Any, ...]] = {
    (_ZERO_GATE, 5.5): _GATES,
    (-3.3, 2.8): (torch.tanh, F.tanh, "tanh", nn.Tanh),
}
"""Operators whose output is on a fixed grid, where the range is wider than that from the first to the last integer."""
_FLAT: dict[Range, tuple[Any, ...]] = {
    (-3.0, 3.0): (F.hardsigmoid, nn.Hardsigmoid),
    (-3.0, math.inf): (F.hardswish, nn.Hardswish),
    (0.0, math.inf): (torch.relu, F.relu, "relu", nn.ReLU),
    (0.0, 6.0): (F.relu6, nn.ReLU6),
    (-4.5, math.inf): (F.gelu, nn.GELU),
    (-10.0, math.inf): (F.silu, nn.SiLU, F.mish, nn.Mish),
}
"""Operators that are constant beyond, or differ from their limit by less than 0.001."""


def limit_ranges(prepared: GraphModule) -> None:
    """Let observers take what no reader tells apart as equal, in place."""
    for observer, calls in observer_calls(prepared).items():
        if observes_activation_range(observer):
            read = _hull([read_range(prepared, call) for call in calls])
            if read != EVERYTHING:
                _limit(getattr(observer, "activation_post_process", observer), read)


def limit_of(observer: Any) -> Range | None:
    """Return the range beyond which an observer of training takes values as equal; None if there is no such range."""
    found: Range | None = getattr(observer, "read_range", None)
    return found


def read_range(network: GraphModule, tensor: Node) -> Range:
    """Return the range in which the readers of a tensor tell values apart.

    `tensor`: an observer's call of a prepared `network`, or a quantize node of a reference network.
    """
    return _hull([_read_by(network, tensor, reader) for reader in tensor.users])


def _hull(ranges: list[Range]) -> Range:
    return min((low for low, _ in ranges), default=-math.inf), max((high for _, high in ranges), default=math.inf)


def _read_by(network: GraphModule, tensor: Node, reader: Node) -> Range:
    if reader.target is DEQUANTIZE:
        return read_range(network, reader)
    target = operator_at(network, reader)
    if target in _PRODUCTS and any(_is_gate(network, other, tensor) for other in reader.all_input_nodes):
        return _ZERO_GATE, math.inf
    if target in _RANGES_IF_ROUNDED and reader.users and all(_rounds(network, user) for user in reader.users):
        return _RANGES_IF_ROUNDED[target]
    if target is nn.Hardtanh:
        layer: Any = network.get_submodule(str(reader.target))
        return layer.min_val, layer.max_val
    return _RANGES.get(target, EVERYTHING)


def _is_gate(network: GraphModule, node: Node, tensor: Node) -> bool:
    """Return whether a node is the rounded sigmoid of a tensor."""
    while node.target in (DEQUANTIZE, QUANTIZE) or observer_at(network, node) is not None:
        node = node.all_input_nodes[0]
    return operator_at(network, node) in _GATES and node.all_input_nodes[:1] == [tensor]


def _rounds(network: GraphModule, node: Node) -> bool:
    observer = observer_at(network, node)
    return node.target is QUANTIZE if observer is None else fixed_grid(observer) is not None


def _limit(observer: Any, read: Range) -> None:
    observer.read_range = read
    if not isinstance(observer, CountingObserver):  # which knows of it
        mix_in(observer, _Limited)


class _Limited:
    """Mixin of an observer."""

    read_range: Range

    def _calculate_qparams(self, min_val: torch.Tensor, max_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        has_range = min_val <= max_val
        low, high = (torch.where(has_range, end.clamp(*self.read_range), end) for end in (min_val, max_val))
        qparams: tuple[torch.Tensor, torch.Tensor] = super()._calculate_qparams(low, high)  # type: ignore[misc]  # torch.ao's
        return qparams


def _by_operator(ranges: dict[Range, tuple[Any, ...]]) -> dict[Any, Range]:
    return {operator: range_ for range_, operators in ranges.items() for operator in operators}


_RANGES_IF_ROUNDED, _RANGES = _by_operator(_ROUNDED), _by_operator(_FLAT)
