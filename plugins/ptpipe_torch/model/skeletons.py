"""Traced networks that this process has built, without their weights: copying one is quicker than tracing it again."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from ptpipe import ReadLog
from ptpipe_torch.model.function_ref import FunctionRef

_MOST_KEPT = 4
_MOST_BYTES = 2**23
"""What one of them may hold: scales and observers, not weights."""
_LARGE_BYTES = 2**12
_PARTS = ("_parameters", "_buffers", "_modules")

_Key: TypeAlias = tuple[tuple[Callable[..., nn.Module], str], ...]
_kept: OrderedDict[_Key, tuple[GraphModule, ReadLog]] = OrderedDict()
"""With the files that were read when they were built."""


def skeleton(builder: FunctionRef, transforms: Sequence[FunctionRef], build: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that `build` returns, or a copy of one that it returned before.

    `builder`, `transforms`: the functions that `build` calls; with equal arguments they return equal networks. Those
    that were traced last are copied, where a copy is sure to be one.
    """
    if not transforms:
        return build()
    roles = [("builder", builder), *(("transform", reference) for reference in transforms)]
    functions = [_function(reference, role) for role, reference in roles]
    arguments = [json.dumps(reference.arguments, sort_keys=True) for _, reference in roles]
    key = tuple(zip(functions, arguments, strict=True))
    kept, log = _kept.pop(key, (None, None))
    if kept is not None and log is not None and log.is_current:
        _kept[key] = kept, log  # the last one again
        log.repeat()
        without = [tensor for tensor in _state(kept).values() if tensor.is_meta]
        return _copied(kept, {id(tensor): _zeros_like(tensor, "cpu") for tensor in without})
    with ReadLog() as log:
        module = build()
    packages = {"torch", *map(_package, (skeleton, *functions[1:]))}
    if isinstance(module, GraphModule) and (weights := _zero_weights(module, packages)) is not None:
        with suppress(Exception):  # of what refuses to be copied
            _kept[key] = _copied(module, weights), log
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return module


def _function(reference: FunctionRef, role: str) -> Callable[..., nn.Module]:
    """Return the function of a reference; that of a file without what reports its errors, which is another each time.

    Decorators of the user's own belong to it.
    """
    function: Any = reference.resolve(role)
    own: Callable[..., nn.Module] = function if reference.source is None else function.__wrapped__
    return own


def _copied(module: GraphModule, weights: Mapping[int, torch.Tensor]) -> GraphModule:
    """Copy a network, with the readers of each node in the same order: the first one names its scale.

    `weights`: what takes the place of a tensor, by its id, wherever it is referred to: in the lists of an `nn.LSTM`.
    """
    memo: dict[int, Any] = dict(weights)
    copied = copy.deepcopy(module, memo)
    _complete(copied, module, memo)
    for graph, copied_graph in zip(_graphs(module), _graphs(copied), strict=True):
        twins = dict(zip(graph.nodes, copied_graph.nodes, strict=True))
        for node, twin in twins.items():
            twin.users = {twins[user]: None for user in node.users}
    return copied


def _complete(copied: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    """Add what torch leaves out of a copy, as the graph doesn't call it; the order becomes that of the network."""
    for kind in _PARTS:
        parts, copied_parts = vars(module)[kind], vars(copied)[kind]
        for name, part in parts.items():
            copied_parts[name] = copied_parts.pop(name) if name in copied_parts else copy.deepcopy(part, memo)
    copied._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module.named_children():
        _complete(copied.get_submodule(name), child, memo)


def _zero_weights(module: GraphModule, packages: Collection[str]) -> Mapping[int, torch.Tensor] | None:
    """Return weights without memory for those that are all zero, by id; None where the network can't be copied.

    Initial weights are zero: see `built_undrawn`. `packages`: those whose layers hide nothing that a copy would share;
    one of the user's own, which a graph may call, can have anything.
    """
    state, layers = _state(module), list(module.modules())
    if not all(map(_is_plain, state.values())) or not all(map(_is_copyable, layers)):
        return None
    if not {_package(type(layer)) for layer in layers}.issubset(packages):
        return None
    if len({tensor.untyped_storage()._cdata for tensor in state.values()}) < len(state):
        return None  # some are views of others
    large = [tensor for tensor in state.values() if tensor.nbytes > _LARGE_BYTES and not tensor.any()]
    weights = {id(tensor): _zeros_like(tensor, "meta") for tensor in large}
    others = (buffer for buffer in module.buffers() if id(buffer) not in state)
    num_bytes = sum(tensor.nbytes for tensor in (*state.values(), *others)) - sum(tensor.nbytes for tensor in large)
    return weights if num_bytes <= _MOST_BYTES else None


def _package(owner: Callable[..., Any]) -> str:
    return owner.__module__.partition(".")[0]


def _state(module: nn.Module) -> dict[int, torch.Tensor]:
    return {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}


def _zeros_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    zeros = torch.zeros_like(tensor, device=device)
    return nn.Parameter(zeros, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else zeros


def _graphs(module: nn.Module) -> Iterator[Graph]:
    return (part.graph for part in module.modules() if isinstance(part, GraphModule))


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not vars(tensor)


def _is_copyable(module: nn.Module) -> bool:
    """Return whether a copy of this very module has all of it, and refers to no part of the network that it is from.

    Functions among its attributes may, hooks say; a copied graph loses its hooks.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    attributes = {name: value for name, value in vars(module).items() if name not in _PARTS}
    if isinstance(module, GraphModule) and any(hooks for name, hooks in attributes.items() if name.endswith("_hooks")):
        return False
    dicts = [value.values() for value in attributes.values() if isinstance(value, dict)]
    lists = [value for value in attributes.values() if isinstance(value, (list, tuple))]
    values = chain(attributes.values(), *dicts, *lists)
    return not any(isinstance(value, FunctionType) and value.__closure__ for value in values)
