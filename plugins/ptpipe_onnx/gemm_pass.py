"""Graph pass that makes one Gemm of a linear layer on sequences.

torch exports a linear layer whose input has more than two axes as a matrix product and an addition. ONNX Runtime has an
integer kernel for the product alone, whose output it rounds or keeps in float for the addition; its kernel of Gemm adds
an int32 bias to the sums. Gemm takes matrices, so the integers are reshaped, which copies nothing.

Shape legend: R rows, all axes of the input but the last one; I its last axis, the inputs of the layer; O outputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import (
    Array,
    add_initializer,
    constant,
    insert_behind,
    insert_node,
    int_attribute,
    known_shape,
    nodes,
    only_consumer,
    producer,
    source,
)
from ptpipe_onnx.grid import Grid

_Sizes: TypeAlias = Sequence[int | str | None]
"""A number, a symbol, or unknown."""


def use_gemm(graph: ir.Graph) -> None:
    """Rewrite DQ-MatMul-Add-Q, with constant weights and bias, as Reshape-DQ-Gemm-Q-Reshape, in place.

    The bias stays float, for `quantize_biases`. Symbolic axes stay symbolic.
    """
    shapes = _Shapes(graph)
    for product in nodes(graph, "MatMul"):
        layer = _LinearLayer.of(product)
        if layer is not None:
            layer.rewrite(shapes)


@dataclass(frozen=True)
class _LinearLayer:
    """A MatMul and an Add between DQ and Q."""

    product: ir.Node
    data: ir.Node
    """The DequantizeLinear of the input."""
    weight_IO: Array
    bias: ir.Value
    quantize: ir.Node

    @classmethod
    def of(cls, product: ir.Node) -> _LinearLayer | None:
        data, weight = (producer(value, "DequantizeLinear") for value in product.inputs)
        add = only_consumer(product.outputs[0], "Add")
        quantize = None if add is None else only_consumer(add.outputs[0], "QuantizeLinear")
        if data is None or Grid.of(data) is None or weight is None or add is None or quantize is None:
            return None
        (bias,) = (value for value in add.inputs if value is not product.outputs[0])
        weight_IO, bias_O = constant(weight.inputs[0]), constant(bias)
        if bias is None or bias_O is None or weight_IO is None or weight_IO.ndim != 2 or not _is_by_column(weight):
            return None
        return cls(product, data, weight_IO, bias, quantize) if bias_O.shape == weight_IO.shape[1:] else None

    def rewrite(self, shapes: _Shapes) -> None:
        """Put a Gemm in the place of both operators, under the name of the product."""
        num_inputs, num_outputs = self.weight_IO.shape
        sizes = known_shape(source(self.data))
        is_matrix = sizes is not None and len(sizes) == 2
        data = self.data.outputs[0] if is_matrix else shapes.rows(self.data, self.product, num_inputs)
        gemm = insert_node(self.product, "Gemm", [data, self.product.inputs[1], self.bias], alpha=1.0, beta=1.0)
        gemm.name = self.product.name
        self.quantize.replace_input_with(0, gemm.outputs[0])
        if not is_matrix:
            shape = shapes.vector(source(self.data), sizes, num_outputs, gemm)
            matrix = self.quantize.outputs[0]
            integers = insert_behind(matrix, "Reshape", shape)
            integers.type, integers.shape, matrix.shape = matrix.type, matrix.shape, None


def _is_by_column(weight: ir.Node) -> bool:
    """Return whether weights have one scale, or one for each column, as integer kernels of a product take them."""
    scales = constant(weight.inputs[1])
    return scales is not None and (scales.size == 1 or int_attribute(weight, "axis", (1,)) in ((1,), (-1,)))


class _Shapes:
    """Inserts what reshapes the inputs and outputs of layers, once for all that are alike."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._rows: dict[ir.Value, ir.Value] = {}
        self._vectors: dict[Hashable, ir.Value] = {}

    def rows(self, data: ir.Node, before: ir.Node, num_inputs: int) -> ir.Value:
        """Return what a DequantizeLinear returns, as a matrix (R, I)."""
        integers = source(data)
        if integers not in self._rows:
            shape = self._constant((-1, num_inputs))
            matrix = insert_node(before, "Reshape", [integers, shape]).outputs[0]
            matrix.name = f"{integers.name}.rows"
            self._rows[integers] = insert_node(before, "DequantizeLinear", [matrix, *data.inputs[1:]]).outputs[0]
        return self._rows[integers]

    def vector(self, data: ir.Value, sizes: _Sizes | None, num_outputs: int, before: ir.Node) -> ir.Value:
        """Return the shape of a layer's output: that of its input, which may be known, with O as the last axis."""
        leading = None if sizes is None else tuple(sizes[:-1])
        if leading is not None and sum(not isinstance(size, int) for size in leading) <= 1:
            return self._constant((*(size if isinstance(size, int) else -1 for size in leading), num_outputs))
        # Axes of one symbol have one size.
        key: Hashable = data if leading is None or None in leading else leading
        if key not in self._vectors:
            self._vectors[key] = insert_node(before, "Shape", [data], start=0, end=-1).outputs[0]
        if (key, num_outputs) not in self._vectors:
            parts = [self._vectors[key], self._constant((num_outputs,))]
            self._vectors[key, num_outputs] = insert_node(before, "Concat", parts, axis=0).outputs[0]
        return self._vectors[key, num_outputs]

    def _constant(self, sizes: Sequence[int]) -> ir.Value:
        key = ("constant", *sizes)
        if key not in self._vectors:
            name = "shape." + ".".join(str(size) for size in sizes)
            self._vectors[key] = add_initializer(self._graph, name, np.array(sizes, np.int64))
        return self._vectors[key]
