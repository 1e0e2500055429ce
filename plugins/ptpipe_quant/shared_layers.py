"""Give each call of a layer, and each function that reads its weights, tensors of its own name: the same parameters."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule


def separate_calls(graph: GraphModule) -> dict[str, str]:
    """Let each further call of a layer of torch use a copy that shares its parameters; return copies' originals.

    FX fuses layers with what follows one call, and an int8 layer has one scale for its output: both would apply to
    all calls. Layers of the user's own that were not traced into stay as they are: they are neither fused nor int8.
    """
    copies: dict[str, str] = {}
    called: set[str] = set()
    for node in graph.graph.nodes:
        if node.op != "call_module":
            continue
        target = str(node.target)
        if target in called and type(layer := graph.get_submodule(target)).__module__.startswith("torch.nn"):
            name = _unused_name(graph, target)
            graph.add_submodule(name, tied_copy(layer))
            node.target = name
            copies[name] = target
        called.add(target)
    return copies


def tied_copy(layer: nn.Module) -> nn.Module:
    """Return a layer of its own that shares parameters, buffers and submodules: training one trains the other."""
    twin: Any = type(layer).__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[name] = dict(layer.__dict__[name])
    return cast(nn.Module, twin)


def tie_weights(graph: GraphModule) -> None:
    """Let functions read the weights of a layer that the network also calls under a second name, in place.

    The parameter is the same, so that training one trains the other. An int8 layer has no float weight to read.
    """
    called = {str(node.target) for node in graph.graph.find_nodes(op="call_module")}
    holders: dict[str, str] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        layer, _, name = str(node.target).rpartition(".")
        tensor = getattr(graph.get_submodule(layer), name)
        if layer not in called or not isinstance(tensor, torch.Tensor):
            continue
        if layer not in holders:
            holders[layer] = _unused_name(graph, layer, "read")
            graph.add_submodule(holders[layer], nn.Module())
        holder = graph.get_submodule(holders[layer])
        register: Any = holder.register_parameter if isinstance(tensor, nn.Parameter) else holder.register_buffer
        register(name, tensor)
        node.target = f"{holders[layer]}.{name}"


def _unused_name(graph: GraphModule, target: str, word: str = "call") -> str:
    names = {name for name, _ in graph.named_modules(remove_duplicate=False)}
    number = 2
    while f"{target}_{word}{number}" in names:
        number += 1
    return f"{target}_{word}{number}"
