"""Regions of a network where autocast is switched off, as operators of its traced graph.

A tracer runs the `with torch.autocast(..., enabled=False)` of a network, and FX records nothing of it. Here each region
has `torch.amp._enter_autocast` in front of it and `torch.amp._exit_autocast` behind it, as torch.export has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.fx import Graph, GraphModule, Node, Tracer

_ENTER, _EXIT = autocast_mode._enter_autocast, autocast_mode._exit_autocast
_DEVICE_TYPES = ("cpu", "cuda")


class AutocastTracer(Tracer):
    """Mixin of a tracer that records where autocast is switched off."""

    _off = ""
    """The type of device for which it is, in the line that is traced; empty: none."""
    _entered: Sequence[Node] = ()

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        """Trace a network."""
        with _autocast_to_float32():
            return super().trace(root, concrete_args)

    def create_node(self, *arguments: Any, **named: Any) -> Node:
        """Record an operator, and in front of it that autocast has been switched off or on again."""
        off = next((type_ for type_ in _DEVICE_TYPES if not torch.is_autocast_enabled(type_)), "")
        if off != self._off:
            for mode in reversed(self._entered):
                super().create_node("call_function", _EXIT, (mode,), {})
            self._entered = [super(AutocastTracer, self).create_node(*call) for call in _entering(off)]
            self._off = off
        return super().create_node(*arguments, **named)


def _entering(device_type: str) -> list[tuple[Any, ...]]:
    """Return the calls that switch autocast off for a type of device; for all if it is the CPU's.

    A network is traced on a CPU, wherever it is trained: a type that it has read is that of its inputs.
    """
    types = [device_type] if device_type else []
    if device_type == "cpu" and torch.cuda.is_available():
        types.append("cuda")
    return [("call_function", _ENTER, (type_, None, False, None), {}) for type_ in types]


@contextmanager
def _autocast_to_float32() -> Iterator[None]:
    """Switch autocast on, as a network that asks whether it is must see it, in a way that changes no value."""
    states = [(type_, torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_)) for type_ in _DEVICE_TYPES]
    for type_ in _DEVICE_TYPES:
        torch.set_autocast_dtype(type_, torch.float32)
        torch.set_autocast_enabled(type_, True)
    try:
        yield
    finally:
        for type_, is_enabled, dtype in states:
            torch.set_autocast_dtype(type_, dtype)
            torch.set_autocast_enabled(type_, is_enabled)


def has_autocast_regions(graph: Graph) -> bool:
    """Return whether autocast is switched off somewhere in a graph."""
    return bool(graph.find_nodes(op="call_function", target=_ENTER))


def remove_autocast_regions(graph: Graph) -> None:
    """Leave autocast as it is, in place."""
    for target in (_EXIT, _ENTER):  # the first takes what the second returns
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)


def inline_autocast_regions(network: GraphModule) -> None:
    """Replace the calls that torch.export records for regions with another autocast by their operators, in place."""
    for region in network.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast):
        device_type, _, is_enabled, _, body, *inputs = region.args
        operators: Any = network.get_submodule(str(body.target)).graph
        copies = dict(zip(operators.find_nodes(op="placeholder"), inputs, strict=True))
        with network.graph.inserting_before(region):
            calls = _entering("" if is_enabled else device_type)
            entered = [network.graph.create_node(*call) for call in calls]
            outputs: Any = network.graph.graph_copy(operators, copies)
            for mode in reversed(entered):
                network.graph.call_function(_EXIT, (mode,))
        for part in list(region.users):  # the call returns a tuple
            part.replace_all_uses_with(outputs[part.args[1]])
            network.graph.erase_node(part)
        network.graph.erase_node(region)
