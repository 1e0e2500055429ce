"""Find the nodes whose values are cast to integers: buckets of distances, bins, positions.

Rounded to 256 values they would become other integers, and what is infinite there, as the logarithm of a distance of 0,
has no range. `quant.prepare` keeps the same float (`ptpipe_quant.float_nodes`).
"""

from __future__ import annotations

from onnx import GraphProto, NodeProto, TensorProto

from ptpipe_onnx.quantization.nodes import LAYERS

_INTEGERS = (
    *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
    *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
)


def nodes_of_integers(graph: GraphProto) -> list[str]:
    """Return the names of the nodes that compute floats, from the last layers in front of such a cast on."""
    producers = {name: node for node in graph.node for name in node.output}
    values = (*graph.input, *graph.value_info)
    floats = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    found, pending = set[str](), [name for node in graph.node if _casts_to_integers(node) for name in node.input]
    while pending:
        name = pending.pop()
        node = producers.get(name)
        if node is not None and name in floats and node.name not in found and node.op_type not in LAYERS:
            found.add(node.name)
            pending += node.input
    return [node.name for node in graph.node if node.name in found]


def _casts_to_integers(node: NodeProto) -> bool:
    return node.op_type == "Cast" and any(own.name == "to" and own.i in _INTEGERS for own in node.attribute)
