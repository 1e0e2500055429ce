"""Gradients that the operators of a traced network alone would not have."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR
from ptpipe_torch.int8.tracer import Scopes
from ptpipe_torch.traced_gradients import NO_GRAD, RETURNS_INPUT


def recorded_functions(graph: GraphModule) -> list[Node]:
    """Return the calls of autograd functions that have not been traced into."""
    return [node for node in graph.graph.nodes if hasattr(node.target, RETURNS_INPUT)]


def detach_without_gradients(graph: GraphModule, scopes: Scopes) -> None:
    """Detach each tensor that is computed inside of `torch.no_grad` where it is used outside, in place."""
    for node in list(graph.graph.nodes):
        if not node.meta.get(NO_GRAD):
            continue
        users = [user for user in node.users if not user.meta.get(NO_GRAD)]
        if TENSOR not in node.meta:
            for user in users:  # takes a part of a tuple
                user.meta[NO_GRAD] = user.target is operator.getitem
        elif users and node.meta[TENSOR][0].is_floating_point:
            _detach(graph, scopes, node, users)


def _detach(graph: GraphModule, scopes: Scopes, node: Node, users: list[Node]) -> None:
    with graph.graph.inserting_after(node):
        detached = graph.graph.call_method("detach", (node,))
    detached.meta |= {**node.meta, NO_GRAD: False}
    scopes[detached.name] = scopes[node.name]
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user in users)
