"""Which operators of a traced network must stay float."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR


def operators_on_integers(graph: GraphModule) -> list[Node]:
    """Return the operators that compute or take integers or truth values, and those whose results become such.

    Rounding to a grid in front of `x.long()`, `x > 0` or `x.argmax(1)` would change the integers. The operators are
    followed back to the last layer with weights.
    """
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        if not _is_float(node):
            _add_with_sources(graph, node, found)
        elif any(not _is_float(source) for source in node.all_input_nodes) and not _has_weights(graph, node):
            found[node] = None
    return list(found)


def _add_with_sources(graph: GraphModule, node: Node, found: dict[Node, None]) -> None:
    pending = [node]
    while pending:
        node = pending.pop()
        if node in found or _has_weights(graph, node):
            continue
        found[node] = None
        pending += [source for source in node.all_input_nodes if TENSOR in source.meta]


def _is_float(node: Node) -> bool:
    dtype: torch.dtype = node.meta[TENSOR][0] if TENSOR in node.meta else torch.float32
    return dtype.is_floating_point or dtype.is_complex


def _has_weights(graph: GraphModule, node: Node) -> bool:
    """Return whether a node is a layer with weights, or no operator at all."""
    if node.op == "call_module":
        return any(True for _ in graph.get_submodule(str(node.target)).parameters())
    return node.op not in ("call_function", "call_method")
