"""Properties of tensors that a forward pass reads while it is traced: those of parameters and buffers are known."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

_PROPERTIES = ("dtype", "shape", "ndim")


def reads_device(node: Node) -> bool:
    """Return whether a node is the device of a tensor."""
    return node.target is getattr and node.args[1] == "device"


def resolve_properties(graph: Graph, module: nn.Module) -> None:
    """Replace properties of parameters, like `self.layer.weight.dtype`, by their values, in place.

    An int8 layer has a method in the place of its weight. The device may change, so that of the input is read.
    """
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not (isinstance(source, Node) and source.op == "get_attr"):
            continue
        if (node.op, node.target) == ("call_method", "size") and not node.kwargs:
            _replace_by(node, attrgetter(str(source.target))(module).size(*node.args[1:]))
        elif node.target is getattr and node.args[1] in _PROPERTIES:
            _replace_by(node, getattr(attrgetter(str(source.target))(module), node.args[1]))
        elif reads_device(node):
            node.args = (next(iter(graph.find_nodes(op="placeholder"))), "device")
        else:
            continue
        if not source.users:
            graph.erase_node(source)


def _replace_by(node: Node, value: Any) -> None:
    value = tuple(value) if isinstance(value, torch.Size) else value
    for user in list(node.users):
        user.args, user.kwargs = map_aggregate(
            (user.args, user.kwargs), lambda argument: value if argument is node else argument
        )
    node.graph.erase_node(node)
