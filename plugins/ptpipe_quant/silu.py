"""Write SiLU, which has no int8 form, as the operators with int8 forms that it consists of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.tracer import Scopes

_INT8_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)


def write_out_silu(graph: GraphModule, scopes: Scopes, float_names: Collection[str]) -> None:
    """Replace SiLU behind an int8 layer by x * sigmoid(x), in place.

    Elsewhere its input is float, and rounding it would cost accuracy and time. `float_names`: layers that stay float.
    """
    for node in list(graph.graph.nodes):
        if (
            node.target not in float_names
            and _is_silu(graph, node)
            and _is_int8_layer(graph, node.args[0], float_names)
        ):
            source: Any = node.args[0]
            with graph.graph.inserting_before(node):
                gate = graph.graph.call_function(torch.sigmoid, (source,))
                product = graph.graph.call_function(torch.mul, (source, gate))
            for new in (gate, product):
                scopes[new.name] = scopes[node.name]
                new.meta.update(node.meta)
            node.replace_all_uses_with(product)
            graph.graph.erase_node(node)


def _is_silu(graph: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return type(graph.get_submodule(str(node.target))) is nn.SiLU
    return node.target is nn.functional.silu


def _is_int8_layer(graph: GraphModule, source: Any, float_names: Collection[str]) -> bool:
    is_layer = isinstance(source, Node) and source.op == "call_module"
    return is_layer and source.target not in float_names and type(graph.get_submodule(source.target)) in _INT8_LAYERS
