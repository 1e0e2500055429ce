"""Which operators of a traced network must stay float."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR


def operators_before_integers(graph: GraphModule) -> list[Node]:
    """Return the operators whose float results become integers or truth values, back to the next layer with weights.

    Rounding to a grid in front of `x.long()`, `x > 0` or `x.argmax(1)` would change the integers.
    """
    found: dict[Node, None] = {}
    pending = [node for node in graph.graph.nodes if not _is_float(node) and any(_float_inputs(node))]
    while pending:
        node = pending.pop()
        found[node] = None
        pending += [source for source in _float_inputs(node) if source not in found and _is_movable(graph, source)]
    return list(found)


def _float_inputs(node: Node) -> Iterator[Node]:
    return (source for source in node.all_input_nodes if TENSOR in source.meta and _is_float(source))


def _is_float(node: Node) -> bool:
    dtype: torch.dtype = node.meta[TENSOR][0] if TENSOR in node.meta else torch.float32
    return dtype.is_floating_point or dtype.is_complex


def _is_movable(graph: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return not list(graph.get_submodule(str(node.target)).parameters())
    return node.op in ("call_function", "call_method")
