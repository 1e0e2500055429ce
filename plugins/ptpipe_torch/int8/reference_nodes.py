"""Queries of a reference network's graph: what a node quantizes, and what was quantized before.

Quantization may be spelled with plain integers, or with quantized tensors, as torch's conversion does.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ptpipe_torch.int8.decomposed import DEQUANTIZE

_WITHOUT_EFFECT = (nn.Identity, nn.modules.dropout._DropoutNd)
"""Modules that return their input in eval mode."""


def dequantized(node: Node) -> Node | None:
    """Return the quantize node whose tensor a node dequantizes; None for any other node."""
    is_method = node.op == "call_method" and node.target == "dequantize"
    return node.all_input_nodes[0] if is_method or node.target is DEQUANTIZE else None


def quantized_before(quantize: Node) -> Node | None:
    """Return the quantize node whose values another one quantizes once more, as they are or behind a dropout."""
    node = quantize.all_input_nodes[0]
    while _changes_nothing(node):
        node = node.all_input_nodes[0]
    return dequantized(node)


def repeated_nodes(network: GraphModule) -> dict[Node, Node]:
    """Return each node that computes what an earlier one does, with the first of these."""
    firsts: dict[Any, Node] = {}
    repeated: dict[Node, Node] = {}
    for node in network.graph.nodes:
        if not node.op.startswith("call"):
            continue
        arguments = map_arg((node.args, node.kwargs), lambda value: f"%{repeated.get(value, value).name}")
        first = firsts.setdefault((node.op, node.target, str(arguments)), node)
        if first is not node:
            repeated[node] = first
    return repeated


def _changes_nothing(node: Node) -> bool:
    if node.op != "call_module":
        return node.target is nn.functional.dropout
    assert node.graph.owning_module is not None
    return isinstance(node.graph.owning_module.get_submodule(str(node.target)), _WITHOUT_EFFECT)
