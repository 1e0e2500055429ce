"""What a forward pass changes beside its outputs: tracing does that once, and a training in each step."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from ptpipe import StageError
from ptpipe_torch.runtime import cpu_random_states

_PLAIN = (bool, int, float, str, type(None))
_CONSTANT = re.compile(r"_tensor_constant\d+")
"""Attributes that tracing itself adds to a network, and their targets."""
_IN_PLACE = re.compile(r"[^_]_$|^__setitem__$|^setitem$")
"""Names of operators that write their first argument."""
_States: TypeAlias = Mapping[str, tuple[Any, Hashable]]


def trace_stateless(module: nn.Module, trace: Callable[[nn.Module], fx.Graph]) -> fx.Graph:
    """Return the graph of a network whose forward pass depends on nothing but its inputs and parameters.

    `trace`: records the forward pass, and may raise anything. Raises StageError where the forward pass draws random
    numbers outside of the graph, changes a buffer, or an attribute that a later pass depends on: a counter, a flag, an
    average. What is kept and never read (an attention map) does no harm: then a second trace is like the first.
    """
    before, random_states = _states(module), _random_states(module)
    graph = trace(module)
    if _random_states(module) != random_states:
        raise StageError(
            "the network can't be split into pipeline stages: its forward pass draws random numbers that decide what "
            "is computed (a layer that is skipped by chance, noise of a fixed shape), and tracing would keep those of "
            "one pass for all steps; use mode ddp"
        )
    buffers = {name for name, _ in module.named_buffers()}
    first = _changed(before, after := _states(module))
    if first and buffers.isdisjoint(first):
        try:
            is_same = _text(trace(module)) == _text(graph)
        except Exception:  # noqa: BLE001  # the first trace's values mean nothing to the second
            is_same = False
        first = _changed(after, _states(module)) or ([] if is_same else first)
    first = first or _written_in_place(module, graph)
    if first:
        name = next((name for name in first if name in buffers), first[0])
        raise StageError(
            f"the network can't be split into pipeline stages: its forward pass assigns {name}, which tracing doesn't "
            "preserve; use mode ddp"
        )
    return graph


def _random_states(module: nn.Module) -> Hashable:
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    on_devices = sorted(torch.cuda.get_rng_state(device).numpy().tobytes() for device in devices)
    return *cpu_random_states(), *on_devices


def _states(module: nn.Module) -> _States:
    """Return the buffers and attributes of all layers, by name, each with what tells whether it has changed."""
    return {
        f"{path}.{name}".lstrip("."): (value, _version(value))
        for path, layer in module.named_modules()
        for attributes in (vars(layer), layer._buffers)
        for name, value in attributes.items()
        if isinstance(value, (*_PLAIN, torch.Tensor, fx.Proxy)) and not _CONSTANT.fullmatch(name)
    }


def _version(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return "traced" if isinstance(value, fx.Proxy) else repr(value)  # nan equals itself


def _changed(before: _States, after: _States) -> list[str]:
    """Return the names that are new or have another value."""
    return [name for name, (_, version) in after.items() if name not in before or before[name][1] != version]


def _written_in_place(module: nn.Module, graph: fx.Graph) -> list[str]:
    """Return the tensors that the graph itself writes, but parameters: what is written was computed while tracing."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    written = (node.args[0] for node in graph.nodes if node.args and _IN_PLACE.search(_name(node.target)))
    targets = [str(node.target) for node in written if isinstance(node, fx.Node) and node.op == "get_attr"]
    return [target for target in targets if target not in parameters]


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _text(graph: fx.Graph) -> str:
    return _CONSTANT.sub("", str(graph))
