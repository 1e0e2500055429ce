"""Graph passes for ONNX Runtime: against optimizations that compute another function (1.31), and for an option.

Each of the former separates two operators that would be fused; it costs a copy.
"""

from __future__ import annotations

import onnx_ir as ir

from ptpipe_onnx.graph import add_initializer, constant, nodes, producer, separate

_WEIGHT_ZERO_POINTS = {"DequantizeLinear": (2,), "MatMulInteger": (3,), "DynamicQuantizeLSTM": (9, 11)}
"""Positions among the inputs of operators."""


def prevent_fusions(graph: ir.Graph) -> None:
    """Apply all passes, in place."""
    _keep_float_weights(graph)
    _keep_padding(graph)


def _keep_float_weights(graph: ir.Graph) -> None:
    """Keep layers with float weights between DequantizeLinear and QuantizeLinear as they are.

    ONNX Runtime (since 1.21) quantizes such weights when it loads the file, with one scale for all channels, also those
    that the file computes from constants.
    """
    for layer in nodes(graph, "Conv", "ConvTranspose", "Gemm"):
        if producer(layer.inputs[0], "DequantizeLinear") and not producer(layer.inputs[1], "DequantizeLinear"):
            separate(layer)


def _keep_padding(graph: ir.Graph) -> None:
    """Keep zeros around the input of max pooling: its own padding, which ONNX Runtime takes, is negative infinity."""
    for pool in nodes(graph, "MaxPool"):
        if producer(pool.inputs[0], "Pad"):
            separate(pool)


def separate_zero_points(graph: ir.Graph) -> None:
    """Give each int8 weight a zero point of its own, in place.

    With its option `session.x64quantprecision`, ONNX Runtime (1.32) refuses a file in which two share one.
    """
    taken: set[str | None] = set()
    for node in nodes(graph, *_WEIGHT_ZERO_POINTS):
        for position in _WEIGHT_ZERO_POINTS[node.op_type]:
            value = node.inputs[position] if position < len(node.inputs) else None
            if value is None or value.dtype != ir.DataType.INT8 or (zeros := constant(value)) is None:
                continue
            if value.name in taken:
                value = add_initializer(graph, str(value.name), zeros)
                node.replace_input_with(position, value)
            taken.add(value.name)
