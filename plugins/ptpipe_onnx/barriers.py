"""Optimization barriers behind DequantizeLinear, for ONNX Runtime: what it finds in front of one stays there.

It moves each DequantizeLinear behind operators that only move values, and gives each reader one of its own, in order to
fuse it with what it then finds. A Flatten (1.21 to 1.32) stops it, and a Reshape brings the shape back: both are views.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import add_initializer, insert_copy, insert_node, known_shape, nodes, producer, replace, source

_VIEW = ".view"
"""In the names of tensors behind barriers that are views."""


def insert_barrier(dequantize: ir.Node, before: ir.Node) -> ir.Value:
    """Insert a barrier behind a DequantizeLinear, in front of a node; return the same values behind it.

    Behind convolutions it is a copy: ONNX Runtime (1.32) moves the transpositions around these behind a copy, and not
    behind a view.
    """
    value, graph = dequantize.outputs[0], before.graph
    assert graph is not None
    if not _is_of_rows(dequantize):
        return insert_copy(value, before)
    shape = known_shape(value)
    if shape is not None and sum(not isinstance(size, int) for size in shape) <= 1:
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        vector = add_initializer(graph, "sizes", np.array(sizes, np.int64))
    else:
        vector = insert_node(before, "Shape", [source(dequantize)]).outputs[0]
    rows = insert_node(before, "Flatten", [value], axis=-1).outputs[0]
    view = insert_node(before, "Reshape", [rows, vector], allowzero=1).outputs[0]
    view.name, view.shape, view.type = f"{rows.name}{_VIEW}", value.shape, value.type
    return view


def drop_views(graph: ir.Graph) -> bool:
    """Remove barriers that are views, in place; return whether there is any.

    For runtimes whose own optimizations they stop.
    """
    views = [node for node in nodes(graph, "Reshape") if str(node.outputs[0].name).endswith(_VIEW)]
    flattened = {view: flatten for view in views if (flatten := producer(view.inputs[0], "Flatten")) is not None}
    for view, flatten in flattened.items():
        replace(view.outputs[0], source(flatten))
    return bool(flattened)


def _is_of_rows(dequantize: ir.Node) -> bool:
    """Return whether a matrix product makes the values, or their axes were moved: no convolution's order of axes."""
    if producer(dequantize.inputs[0], "Transpose", "Reshape") is not None:
        return True
    quantize = producer(dequantize.inputs[0], "QuantizeLinear")
    return quantize is not None and producer(quantize.inputs[0], "MatMul", "Gemm") is not None
