"""Write operators that only move values in the spellings that have an int8 form in FX quantization.

Others would be float between two int8 tensors. What takes a tensor apart is not of these: see `int8.moved_integers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR
from ptpipe_torch.int8.tracer import SOURCE_LINE, Scopes

_PERMUTATIONS = {"movedim", "moveaxis", "permute", "swapaxes", "swapdims", "t"}
"""Functions and methods of torch with no other effect than an order of axes."""
_NAMES: dict[Any, str] = {getattr(torch, name): name for name in (*_PERMUTATIONS, "unflatten")}
_ATTRIBUTES = ("T", "mT")
_UNFLATTEN = ("dim", "sizes")
_FLATTEN = ("start_dim", "end_dim")


def use_known_moves(graph: GraphModule, scopes: Scopes) -> None:
    """Replace operators that order, merge or divide axes by `permute`, `torch.flatten` and `reshape`, in place."""
    for node in list(graph.graph.nodes):
        name = _name(graph, node)
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or TENSOR not in source.meta:
            continue
        if name in _PERMUTATIONS or (node.target is getattr and node.args[1] in _ATTRIBUTES):
            _permute(node, source, name)
        elif name == "flatten":
            arguments = _arguments(node, _FLATTEN)
            node.op, node.target, node.kwargs = "call_function", torch.flatten, {}
            node.args = (source, arguments.get("start_dim", 0), arguments.get("end_dim", -1))
        elif name == "unflatten":
            _reshape(graph, scopes, node, source)


def _name(graph: GraphModule, node: Node) -> str | None:
    """Return what the method of this function or layer is called."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_module":
        return "unflatten" if type(graph.get_submodule(str(node.target))) is nn.Unflatten else None
    return _NAMES.get(node.target) if node.op == "call_function" else None


def _permute(node: Node, source: Node, name: str | None) -> None:
    _, num_dims = source.meta[TENSOR]
    axes = torch.empty(tuple(range(num_dims)), device="meta")  # each axis has its number as its size
    if name is None:
        axes = getattr(axes, str(node.args[1]))
    elif node.op == "call_method" or node.target is torch.t:
        axes = getattr(axes, name)(*node.args[1:], **node.kwargs)
    else:
        axes = getattr(torch, name)(axes, *node.args[1:], **node.kwargs)
    node.op, node.target, node.args, node.kwargs = "call_method", "permute", (source, *axes.shape), {}


def _reshape(graph: GraphModule, scopes: Scopes, node: Node, source: Node) -> None:
    """Replace `unflatten`. Sizes of the other axes may depend on the input."""
    if node.op == "call_module":
        layer: Any = graph.get_submodule(str(node.target))
        arguments = {"dim": layer.dim, "sizes": layer.unflattened_size}
    else:
        arguments = _arguments(node, _UNFLATTEN)
    _, num_dims = source.meta[TENSOR]
    dim, sizes = arguments.get("dim"), arguments.get("sizes")
    if not isinstance(dim, int) or not isinstance(sizes, tuple | list):  # a name, or sizes that are computed
        return
    others: list[Any] = []
    for axis in (axis for axis in range(num_dims) if axis != dim % num_dims):
        with graph.graph.inserting_before(node):
            size = graph.graph.call_method("size", (source, axis))
        scopes[size.name] = scopes[node.name]
        size.meta[SOURCE_LINE] = node.meta.get(SOURCE_LINE, "")
        others.append(size)
    others[dim % num_dims : dim % num_dims] = sizes
    node.op, node.target, node.args, node.kwargs = "call_method", "reshape", (source, *others), {}


def _arguments(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a method, behind the tensor, by name."""
    return dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
