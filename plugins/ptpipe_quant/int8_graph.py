"""Graph passes around FX conversion to int8: remove redundant clamps, fix layouts for qnnpack."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.qat_graph import observed_behind, range_observer_at, reaches_only

F = nn.functional

_CLAMP_LAYERS = (nn.ReLU6, nn.Hardtanh)
_CLAMP_FUNCTIONS = (F.relu6, F.hardtanh, torch.clamp)


def drop_redundant_clamps(prepared: GraphModule) -> None:
    """Remove each ReLU6 whose limits the int8 range of its input already has.

    If an operator's output goes only to ReLU6, its range was observed behind ReLU6 (see `qat_graph`) and ends where
    ReLU6 does; integers saturate there anyway. Those of a concatenation extend to the ranges of its other tensors.
    """
    graph, modules = prepared.graph, dict(prepared.named_modules(remove_duplicate=False))
    for node in list(graph.nodes):
        if not node.args or not isinstance(source := node.args[0], Node) or not _clamps_from_zero(prepared, node):
            continue
        observer = range_observer_at(prepared, source)
        if observer is None or not reaches_only(prepared, source, observer):
            continue
        calls = {call for call in graph.find_nodes(op="call_module") if modules[str(call.target)] is observer}
        # Beside the clamp's input, all that it observes is the clamp's output.
        if calls <= {source, *observed_behind(prepared, node, observer)}:
            for behind in list(node.users):
                behind.replace_all_uses_with(source)
                graph.erase_node(behind)
            graph.erase_node(node)
    prepared.recompile()


def make_clamps_contiguous(converted: GraphModule) -> None:
    """Make the inputs of clamps contiguous: qnnpack's kernel permutes channels-last elements (torch 2.13)."""
    graph = converted.graph
    for node in list(graph.nodes):
        layer = converted.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, _CLAMP_LAYERS) or node.target in (*_CLAMP_FUNCTIONS, "clamp"):
            with graph.inserting_before(node):
                contiguous = graph.call_method("contiguous", (node.args[0],))
            node.replace_input_with(node.args[0], contiguous)
    converted.recompile()


def _clamps_from_zero(prepared: GraphModule, node: Node) -> bool:
    """Return whether a node is a ReLU6."""
    if node.op == "call_module":
        layer = prepared.get_submodule(str(node.target))
        return isinstance(layer, nn.Hardtanh) and type(layer) in _CLAMP_LAYERS and layer.min_val == 0
    return node.target is F.relu6
