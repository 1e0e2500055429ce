"""Dynamically quantized linear layers in a float graph.

torch quantizes such a layer's input at run time, over the whole tensor, and multiplies integers. ONNX says the same
with DynamicQuantizeLinear and MatMulInteger, which ONNX Runtime fuses into one kernel. One thing differs: torch's
x86 engines may use 7 bits of the input (`reduce_range`), DynamicQuantizeLinear always has 8. On an x86 processor
without VNNI, ONNX Runtime's products of full bytes can saturate; the comparison with torch finds that where it runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from ptpipe import StageError
from ptpipe_onnx.graph import (
    Graph,
    Node,
    Value,
    add_constant,
    add_node,
    consumers,
    integers,
    only_consumer,
    remove_unused,
    replace,
)
from ptpipe_onnx.weights import QuantizedWeight, taken_weight

_FLOAT = 1
"""onnx.TensorProto.FLOAT"""


def quantize_linear_layers(graph: Graph, weights: Mapping[str, QuantizedWeight]) -> None:
    """Let the layers of these weights multiply integers, in place.

    Raises StageError where a weight is not that of a plain matrix product.
    """
    for name, weight in weights.items():
        value = taken_weight(graph, name)
        parts = _stored(graph, name, weight.transposed())
        for reader in consumers(value):
            if reader.op_type == "Gemm" and value is reader.inputs[1] and integers(reader, "transB", (0,)) == (1,):
                replace(reader.outputs[0], _product(reader, parts))
            elif reader.op_type == "Transpose" and (product := only_consumer(reader.outputs[0], "MatMul")) is not None:
                replace(product.outputs[0], _product(product, parts))
            else:
                raise StageError(f"{name} is used by {reader.op_type}: its layer can't be exported as dynamic int8")
    remove_unused(graph)


def _stored(graph: Graph, name: str, weight: QuantizedWeight) -> tuple[Value, Value, Value | None]:
    is_symmetric = not weight.zero_points.any()
    return (
        add_constant(graph, name, weight.integers),
        add_constant(graph, f"{name}.scale", weight.scales),
        None if is_symmetric else add_constant(graph, f"{name}.zero_point", weight.zero_points),
    )


def _product(layer: Node, parts: tuple[Value, Value, Value | None]) -> Value:
    """The layer's inputs @ weight + bias, multiplied in integers, put in front of the layer."""
    weight, weight_scale, weight_zero_point = parts
    integers_, scale, zero_point = add_node(layer, "DynamicQuantizeLinear", [layer.inputs[0]], num_outputs=3).outputs
    sums = add_node(layer, "MatMulInteger", [integers_, weight, zero_point, weight_zero_point]).outputs[0]
    sums = add_node(layer, "Cast", [sums], to=_FLOAT).outputs[0]
    scales = add_node(layer, "Mul", [scale, weight_scale]).outputs[0]
    result: Value = add_node(layer, "Mul", [sums, scales]).outputs[0]
    if layer.op_type == "Gemm" and len(layer.inputs) == 3:
        result = add_node(layer, "Add", [result, layer.inputs[2]]).outputs[0]
    return result
