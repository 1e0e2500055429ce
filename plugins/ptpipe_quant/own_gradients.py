"""Give a traced network gradients that its operators alone would not have."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR
from ptpipe_torch.int8.tracer import SOURCE_LINE, Scopes
from ptpipe_torch.traced_gradients import NO_GRAD, RETURNS_INPUT


class _Applied(nn.Module):
    """Calls a function of one tensor and constants."""

    def __init__(self, function: Any, node: Node) -> None:
        super().__init__()
        self._function, self._constants, self._named = function, node.args[1:], node.kwargs

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(x, *self._constants, **self._named)


def identity_until_training(layer: nn.Module) -> nn.Identity:
    """Return a layer that computes nothing, in whose place `training_graph` puts this one."""
    identity = nn.Identity()
    identity.__dict__["_for_training"] = layer  # not a submodule: no part of the graph until then
    return identity


def keep_gradients(graph: GraphModule, scopes: Scopes) -> None:
    """Give a graph the gradients of the network that was traced, in place."""
    _detach_without_gradients(graph, scopes)
    _use_identities(graph)


def recorded_functions(graph: GraphModule) -> list[Node]:
    """Return the calls of autograd functions that have not been traced into."""
    return [node for node in graph.graph.nodes if hasattr(node.target, RETURNS_INPUT)]


def _use_identities(graph: GraphModule) -> None:
    """Replace functions that change nothing but gradients by identities until training, in place."""
    for node in recorded_functions(graph):
        if getattr(node.target, RETURNS_INPUT) and node.all_input_nodes == list(node.args[:1]):
            name = f"{node.name}_identity"
            graph.add_submodule(name, identity_until_training(_Applied(node.target, node)))
            node.op, node.target, node.args, node.kwargs = "call_module", name, node.args[:1], {}


def _detach_without_gradients(graph: GraphModule, scopes: Scopes) -> None:
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
    detached.meta |= {key: node.meta[key] for key in (TENSOR, SOURCE_LINE) if key in node.meta}
    scopes[detached.name] = scopes[node.name]
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user in users)
