"""Gemm in the form that ONNX Runtime's quantizers take: without factors, its bias as one axis of its outputs."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, NodeProto, numpy_helper

from ptpipe_onnx.graph import Array
from ptpipe_onnx.quantization.nodes import NodeNames

_FACTORS = {"alpha": 1, "beta": 2}
"""Of which input each is a factor; of both matrices, the second may be constant."""


def write_plain_gemms(graph: GraphProto) -> None:
    """Fold factors, and flatten biases, in place, where weights and biases are constant; drop biases without a name."""
    for node in graph.node:
        if node.op_type == "Gemm" and not all(node.input):
            del node.input[2:]
    _fold_factors(graph)
    _flatten_biases(graph)


def _fold_factors(graph: GraphProto) -> None:
    """Multiply weights by `alpha` and biases by `beta`: integer kernels leave out `beta`, or have no such form."""
    names, stored = NodeNames(graph), {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        factors = (
            [own for own in node.attribute if own.name in _FACTORS and own.f != 1] if node.op_type == "Gemm" else []
        )
        for factor in factors:
            index = _FACTORS[factor.name]
            tensor = stored.get(node.input[index]) if index < len(node.input) else None
            if tensor is not None:
                content = numpy_helper.to_array(tensor)
                _store(graph, names, node, index, content * content.dtype.type(factor.f))
                factor.f = 1.0


def _flatten_biases(graph: GraphProto) -> None:
    """Give each Gemm a bias with an axis of its outputs alone: the quantizer indexes it by output, whatever its shape.

    Those of TensorFlow and JAX are (1, outputs).
    """
    names, stored = NodeNames(graph), {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "Gemm" or len(node.input) < 3 or not {node.input[1], node.input[2]} <= set(stored):
            continue
        is_transposed = any(own.name == "transB" and own.i for own in node.attribute)
        num_outputs = stored[node.input[1]].dims[0 if is_transposed else 1]
        bias = numpy_helper.to_array(stored[node.input[2]])
        if bias.shape != (num_outputs,) and bias.size in (1, num_outputs):
            _store(graph, names, node, 2, np.broadcast_to(bias.reshape(-1), num_outputs).copy())


def _store(graph: GraphProto, names: NodeNames, node: NodeProto, index: int, content: Array) -> None:
    """Give a node another weight or bias: in place of the one that it has, if nothing else reads that."""
    name = node.input[index]
    if len(names.readers(name)) == 1:
        next(own for own in graph.initializer if own.name == name).CopyFrom(numpy_helper.from_array(content, name))
        return
    node.input[index] = f"{node.name}_{'weight' if index == 1 else 'bias'}"
    graph.initializer.append(numpy_helper.from_array(content, node.input[index]))
