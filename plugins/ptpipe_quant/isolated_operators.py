"""Operators that no int8 layer computes for or reads: what turns a recurrent layer's state around, or a sum before it.

In int8 they would be between two roundings that nothing is gained by; of a streaming network, each call would round the
state again, to a range that calibration saw.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR
from ptpipe_torch.int8.fx import FLOAT_SCOPE, backend_config
from ptpipe_torch.int8.moved_integers import SPLITS
from ptpipe_torch.int8.tracer import Scopes

_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_PIECES: tuple[Any, ...] = (operator.getitem, *SPLITS)


def isolated_operators(graph: GraphModule, scopes: Scopes, float_names: Collection[str]) -> list[Node]:
    """Return the operators from which no int8 layer or product is reached through others that may be int8.

    `scopes`, `float_names`: of a `TracedNetwork`.
    """
    candidates = {node for node in graph.graph.nodes if _may_be_int8(graph, node, scopes, float_names)}
    reached = {node for node in candidates if node.target is torch.matmul or _is_layer(graph, node)}
    pending = list(reached)
    while pending:
        node = pending.pop()
        others = (candidates - reached).intersection((*node.all_input_nodes, *node.users))
        reached |= others
        pending += others
    return [node for node in graph.graph.nodes if node in candidates and node not in reached]


def _may_be_int8(graph: GraphModule, node: Node, scopes: Scopes, float_names: Collection[str]) -> bool:
    if not node.op.startswith("call_") or TENSOR not in node.meta:
        return node.target in SPLITS  # which return several tensors
    kind = type(graph.get_submodule(str(node.target))) if node.op == "call_module" else node.target
    path, _ = scopes.get(node.name, ("", None))
    is_float = node.target in float_names or path.startswith(FLOAT_SCOPE)
    return not is_float and (kind in _PIECES or any(kind == each.pattern for each in backend_config().configs))


def _is_layer(graph: GraphModule, node: Node) -> bool:
    return node.op == "call_module" and isinstance(graph.get_submodule(str(node.target)), _LAYERS)
