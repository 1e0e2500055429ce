"""Graph passes against optimizations of ONNX Runtime that compute another function (1.31).

Each puts an operator without effect, a maximum of one tensor, between two that would be fused; it costs a copy. No
runtime is known to remove it.
"""

from __future__ import annotations

import onnx_ir as ir

from ptpipe_onnx.graph import constant, insert_node, nodes, producer


def prevent_fusions(graph: ir.Graph) -> None:
    """Apply all passes, in place."""
    _keep_float_weights(graph)
    _keep_padding(graph)


def _keep_float_weights(graph: ir.Graph) -> None:
    """Keep layers with float weights between DequantizeLinear and QuantizeLinear as they are.

    ONNX Runtime (since 1.21) quantizes such weights when it loads the file, with one scale for all channels.
    """
    for layer in nodes(graph, "Conv", "ConvTranspose", "Gemm"):
        if producer(layer.inputs[0], "DequantizeLinear") and constant(layer.inputs[1]) is not None:
            _separate(layer)


def _keep_padding(graph: ir.Graph) -> None:
    """Keep zeros around the input of max pooling: its own padding, which ONNX Runtime takes, is negative infinity."""
    for pool in nodes(graph, "MaxPool"):
        if producer(pool.inputs[0], "Pad"):
            _separate(pool)


def _separate(node: ir.Node) -> None:
    node.replace_input_with(0, insert_node(node, "Max", [node.inputs[0]]).outputs[0])
