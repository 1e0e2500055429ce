"""Find the layers that ONNX Runtime's quantizer fails on, or writes in forms that have no kernel."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

from ptpipe import StageError
from ptpipe_onnx.quantization.nodes import LAYERS


def batched_products(graph: GraphProto) -> list[str]:
    """Return the names of the products with several constant matrices.

    Integer operators take a scale for each channel of one.
    """
    batched = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 2}
    return [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in batched]


def grouped_transposed(graph: GraphProto) -> list[str]:
    """Return the names of the transposed convolutions of several groups with a bias.

    The quantizer takes the weight's scales, one for each channel of a group, for the bias too.
    """
    return [
        node.name
        for node in graph.node
        if node.op_type == "ConvTranspose"
        and len(node.input) > 2
        and any(own.name == "group" and helper.get_attribute_value(own) > 1 for own in node.attribute)
    ]


def check_weights(graph: GraphProto, skipped: list[str], kind: str) -> None:
    """Raise StageError for a weight or bias with values that are not finite, of a layer that is not skipped."""
    stored = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    for node in graph.node:
        if node.op_type not in LAYERS or node.name in skipped:
            continue
        for name in node.input:
            if name in stored and not np.isfinite(numpy_helper.to_array(stored[name])).all():
                raise StageError(f"{kind}: {name}, which {node.name} reads, has values that are not finite")
