"""Write SiLU, which has no int8 form, as the operators with int8 forms that it consists of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_quant.float_nodes import is_layer
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
        if not is_layer(graph, node, nn.SiLU) and node.target is not nn.functional.silu:
            continue
        source: Any = node.args[0]
        if not is_layer(graph, source, *_INT8_LAYERS) or node.target in float_names or source.target in float_names:
            continue
        with graph.graph.inserting_before(node):
            gate = graph.graph.call_function(torch.sigmoid, (source,))
            product = graph.graph.call_function(torch.mul, (source, gate))
        for new in (gate, product):
            scopes[new.name] = scopes[node.name]
            new.meta.update(node.meta)
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
