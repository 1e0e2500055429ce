"""Graph pass that makes linear layers of a float graph dynamically quantized.

torch quantizes such a layer's input at run time, over the whole tensor, and multiplies integers. The ONNX equivalent is
DynamicQuantizeLinear and MatMulInteger, which ONNX Runtime fuses into one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import onnx_ir as ir

from ptpipe import StageError
from ptpipe_onnx.graph import (
    add_initializer,
    consumers,
    insert_node,
    int_attribute,
    only_consumer,
    remove_unused,
    replace,
    source,
)
from ptpipe_onnx.weights import take_weight
from ptpipe_torch.int8.layers import QuantizedWeight

Operands: TypeAlias = tuple[ir.Value, ir.Value, ir.Value | None]
"""An int8 weight, its scale or scales, and its zero points, None if they are 0."""


def quantize_linear_layers(model: ir.Model, weights: Mapping[str, QuantizedWeight]) -> None:
    """Make the layers of these weights multiply integers, in place. `weights`: by initializer name.

    Raises StageError if a weight is not an operand of a matrix product.
    """
    for name, weight in weights.items():
        value = take_weight(model.graph, name)
        operands = add_operands(model.graph, name, weight.transposed())
        for reader in consumers(value):
            if reader.op_type == "Gemm" and value is reader.inputs[1] and int_attribute(reader, "transB", (0,)) == (1,):
                replace(reader.outputs[0], _multiply(reader, operands))
            elif reader.op_type == "Transpose" and (product := only_consumer(reader.outputs[0], "MatMul")) is not None:
                replace(product.outputs[0], _multiply(product, operands))
            else:
                raise StageError(f"{name} is used by {reader.op_type}: its layer can't be exported as dynamic int8")
    remove_unused(model)


def add_operands(graph: ir.Graph, name: str, weight: QuantizedWeight) -> Operands:
    """Add a weight, inputs by outputs, with its scale and its zero points, if it has any."""
    is_symmetric = not weight.zero_points.any()
    return (
        add_initializer(graph, name, weight.integers),
        add_initializer(graph, f"{name}.scale", weight.scales),
        None if is_symmetric else add_initializer(graph, f"{name}.zero_point", weight.zero_points),
    )


def _multiply(layer: ir.Node, operands: Operands) -> ir.Value:
    """Insert inputs @ weight + bias, multiplied in integers, in front of the layer; return the result."""
    result = insert_product(partial(insert_node, layer), source(layer), operands)
    if layer.op_type == "Gemm" and len(layer.inputs) == 3:
        result = insert_node(layer, "Add", [result, layer.inputs[2]]).outputs[0]
    return result


def insert_product(insert: Callable[..., ir.Node], x: ir.Value, operands: Operands) -> ir.Value:
    """Insert x @ weight, multiplied in integers; return the result.

    `insert`: function of an operator's type, its inputs, `num_outputs` and attributes, that adds a node.
    """
    weight, weight_scale, weight_zero_point = operands
    integers, scale, zero_point = insert("DynamicQuantizeLinear", [x], num_outputs=3).outputs
    sums = insert("MatMulInteger", [integers, weight, zero_point, weight_zero_point]).outputs[0]
    sums = insert("Cast", [sums], to=ir.DataType.FLOAT).outputs[0]
    scales = insert("Mul", [scale, weight_scale]).outputs[0]
    return insert("Mul", [sums, scales]).outputs[0]
