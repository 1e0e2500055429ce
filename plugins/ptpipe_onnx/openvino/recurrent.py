"""Weights of recurrent layers that OpenVINO reads: it (2026.4) takes those that are stored as floats alone."""

from __future__ import annotations

import onnx_ir as ir

from ptpipe_onnx.graph import Array, add_initializer, constant, nodes, producer


def use_float_weights(graph: ir.Graph) -> bool:
    """Store weights of float recurrent layers that are int8 in the file as floats, in place; return whether any are."""
    stored = {
        (layer, place): floats
        for layer in nodes(graph, "LSTM", "GRU", "RNN")
        for place in (1, 2)
        if (floats := _floats(layer.inputs[place])) is not None
    }
    for (layer, place), floats in stored.items():
        layer.replace_input_with(place, add_initializer(graph, f"{layer.outputs[0].name}.weight_{place}", floats))
    return bool(stored)


def _floats(value: ir.Value | None) -> Array | None:
    """Return the product of integers and scales, see `store_float_weights`; None for anything else."""
    product = producer(value, "Mul")
    cast = None if product is None else producer(product.inputs[0], "Cast")
    if product is None or cast is None:
        return None
    integers, scales = constant(cast.inputs[0]), constant(product.inputs[1])
    return None if integers is None or scales is None else integers.astype(scales.dtype) * scales
