"""What the int8 graph needs beyond what torch.ao makes of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.training_graph import comes_by, watcher_at

F = nn.functional

_FULL_RANGE = 255
_CLAMP_LAYERS = (nn.ReLU6, nn.Hardtanh)
_CLAMP_FUNCTIONS = (F.relu6, F.hardtanh, torch.clamp)


def drop_idle_clamps(prepared: GraphModule) -> None:
    """Leave out each ReLU6 whose limits the int8 range of its input already has.

    Where an operator's only way on is through ReLU6, its range was watched behind it (see `training_graph`) and ends
    where ReLU6 does; 8-bit integers saturate there by themselves. Those of a reduced range go on to twice as far.
    """
    graph = prepared.graph
    for node in list(graph.nodes):
        watcher = watcher_at(prepared, node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if watcher is None or not _cuts_at_zero(prepared, node) or not comes_by(prepared, node.args[0], watcher):
            continue
        if getattr(watcher, "quant_max", None) == _FULL_RANGE:
            for behind in list(node.users):
                behind.replace_all_uses_with(node.args[0])
                graph.erase_node(behind)
            graph.erase_node(node)
    prepared.recompile()


def lay_out_for_qnnpack(converted: GraphModule) -> None:
    """Let clamping see contiguous tensors only: qnnpack's mixes up the elements of channels-last ones (torch 2.13)."""
    graph = converted.graph
    for node in list(graph.nodes):
        layer = converted.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, _CLAMP_LAYERS) or node.target in (*_CLAMP_FUNCTIONS, "clamp"):
            with graph.inserting_before(node):
                contiguous = graph.call_method("contiguous", (node.args[0],))
            node.replace_input_with(node.args[0], contiguous)
    converted.recompile()


def _cuts_at_zero(prepared: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        layer = prepared.get_submodule(str(node.target))
        return type(layer) in _CLAMP_LAYERS and layer.min_val == 0
    return node.target is F.relu6
