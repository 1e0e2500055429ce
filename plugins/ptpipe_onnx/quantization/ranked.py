"""Find the nodes to keep float in a file that ranks values (TopK), as detectors do.

Rounded scores are often equal, and which comes first would depend on the runtime. What is joined behind the last layers
would have one grid: boxes of hundreds of pixels, scores of 0 to 1, numbers of classes. `quant.prepare` keeps the same
float (`ptpipe_quant.float_nodes`).
"""

from __future__ import annotations

from onnx import GraphProto, NodeProto

from ptpipe_onnx.quantization.nodes import LAYERS, in_front_of_layers

_BY_POSITION = ("TopK", "Gather", "GatherElements", "GatherND")
"""Operators whose first input has the values."""


def ranks_values(graph: GraphProto) -> bool:
    """Return whether a graph ranks values."""
    return any(node.op_type == "TopK" for node in graph.node)


def ranked_nodes(graph: GraphProto) -> list[str]:
    """Return the names of the nodes from the last layers in front of each TopK on, and of all behind the last layers.

    None where nothing is ranked.
    """
    if not ranks_values(graph):
        return []
    producers = {name: node for node in graph.node for name in node.output}
    ranked, pending = set[str](), [node for node in graph.node if node.op_type == "TopK"]
    while pending:
        node = pending.pop()
        if node.name not in ranked:
            ranked.add(node.name)
            pending += [producers[name] for name in _values(node) if name in producers]
    inner = in_front_of_layers(graph)
    return [node.name for node in graph.node if node.name in ranked or node.name not in inner]


def _values(node: NodeProto) -> list[str]:
    """Return the inputs whose values decide the order of what a node returns; none of a layer."""
    if node.op_type in LAYERS:
        return []
    return list(node.input[:1] if node.op_type in _BY_POSITION else node.input)
