"""Graph pass that writes linear layers on sequences as convolutions of one position, between transpositions.

torch exports a linear layer whose input has more than two axes as a matrix product and an addition. ONNX Runtime has an
integer kernel for the product alone, whose output it rounds or keeps in float for the addition. Its kernel of
convolutions adds an int32 bias to the sums, and rounds as it multiplies. It runs with channels last, which is how
sequences are: both transpositions disappear when the file is loaded. A layer of very many inputs, whose sums take far
longer than their rounding, becomes a Gemm on rows instead.

Shape legend: I the last axis of the input, the inputs of the layer; O outputs; R rows, all axes of the input but I.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import (
    Array,
    add_initializer,
    constant,
    insert_node,
    insert_reshape,
    insert_restoring,
    int_attribute,
    known_shape,
    nodes,
    only_consumer,
    other_input,
    producer,
    replace,
    source,
)
from ptpipe_onnx.grid import Grid

_Sizes: TypeAlias = Sequence[int | str | None]
"""A number, a symbol, or unknown."""
_TRANSPOSED, _CHANNELS_FIRST, _ROWS = ".transposed", ".channels_first", ".rows"
"""Suffixes of names, as in `weights` and `tensor_names`."""
_ONE_POSITION = {"group": 1, "strides": 1, "pads": 0}
"""Attributes of a convolution that computes each position from itself."""
_CONVOLVED_AXES = (3, 4)
"""Numbers of axes of inputs that a convolution takes as they are."""
_WIDE = 2048
"""Number of inputs from which on a Gemm takes at most 1.3x the time of a convolution, and with AMX half."""


def use_convolutions(graph: ir.Graph) -> None:
    """Rewrite DQ-MatMul-Q and DQ-MatMul-Add-Q, with constant weight and bias, as Transpose-DQ-Conv-Q-Transpose.

    In place. The bias stays float, for `quantize_biases`. On matrices, and of many inputs (`_WIDE`), MatMul and Add
    become Gemm, and a MatMul alone stays.
    """
    shared = _Shared(graph)
    for product in nodes(graph, "MatMul"):
        layer = _LinearLayer.of(product)
        if layer is not None:
            layer.rewrite(shared)


def use_products(graph: ir.Graph) -> bool:
    """Rewrite what `use_convolutions` writes as DQ-MatMul-Add-Q, in place; return whether there is any.

    For runtimes that don't compute with channels last, and transpose.
    """
    layers = {node: layer for node in nodes(graph, "Conv") if (layer := SequenceLayer.of(node)) is not None}
    for convolution, layer in layers.items():
        layer.write_as_product(graph, convolution)
    return bool(layers)


def channels_first(num_axes: int) -> tuple[int, ...]:
    """Return the order of axes that brings the last one behind the first one."""
    return (0, num_axes - 1, *range(1, num_axes - 1))


def channels_last(num_axes: int) -> tuple[int, ...]:
    """Return the order of axes that undoes `channels_first`."""
    return (0, *range(2, num_axes), 1)


@dataclass(frozen=True)
class SequenceLayer:
    """A linear layer on a sequence as this pass writes it: Transpose-DQ-Conv-Q-Transpose."""

    before: ir.Node
    """The Transpose of the input."""
    data: ir.Node
    weight: ir.Node
    """The DequantizeLinear of the weight, (O, I, 1, ...)."""
    quantize: ir.Node
    behind: ir.Node
    """The Transpose of the output."""

    @property
    def num_axes(self) -> int:
        """Number of the kernel's axes."""
        return _integers(self.weight).ndim - 2

    @classmethod
    def of(cls, convolution: ir.Node) -> SequenceLayer | None:
        """Return the layer that a convolution is; None if it is none."""
        data = producer(convolution.inputs[0], "DequantizeLinear")
        before = None if data is None else producer(data.inputs[0], "Transpose")
        quantize = only_consumer(convolution.outputs[0], "QuantizeLinear")
        behind = None if quantize is None else only_consumer(quantize.outputs[0], "Transpose")
        weight = producer(convolution.inputs[1], "DequantizeLinear")
        kernel = None if weight is None else constant(weight.inputs[0])
        if data is None or before is None or quantize is None or behind is None or weight is None or kernel is None:
            return None
        order, order_behind = (int_attribute(node, "perm", ()) for node in (before, behind))
        is_of_last_axis = (order, order_behind) == (channels_first(len(order)), channels_last(len(order)))
        is_of_one_position = prod(kernel.shape[2:]) == 1 and all(
            set(int_attribute(convolution, name, (default,))) <= {default} for name, default in _ONE_POSITION.items()
        )
        return cls(before, data, weight, quantize, behind) if is_of_last_axis and is_of_one_position else None

    def write_as_product(self, graph: ir.Graph, convolution: ir.Node) -> None:
        """Put MatMul and Add in the place of all five operators."""
        kernel, name = _integers(self.weight), source(self.weight).name
        weight_IO = add_initializer(graph, f"{name}{_TRANSPOSED}", kernel.reshape(len(kernel), -1).T)
        operands = [
            insert_node(convolution, "DequantizeLinear", [self.before.inputs[0], *self.data.inputs[1:]]).outputs[0],
            insert_node(convolution, "DequantizeLinear", [weight_IO, *self.weight.inputs[1:]], axis=1).outputs[0],
        ]
        result = insert_node(convolution, "MatMul", operands).outputs[0]
        if len(convolution.inputs) == 3:
            result = insert_node(convolution, "Add", [result, convolution.inputs[2]]).outputs[0]
        self.quantize.replace_input_with(0, result)
        replace(self.behind.outputs[0], self.quantize.outputs[0])


@dataclass(frozen=True)
class _LinearLayer:
    """A MatMul, and perhaps an Add, between DQ and Q."""

    product: ir.Node
    data: ir.Node
    """The DequantizeLinear of the input."""
    weight: ir.Node
    """The DequantizeLinear of the weight, (I, O)."""
    bias: ir.Value | None
    quantize: ir.Node

    @classmethod
    def of(cls, product: ir.Node) -> _LinearLayer | None:
        data, weight = (producer(value, "DequantizeLinear") for value in product.inputs)
        add = only_consumer(product.outputs[0], "Add")
        quantize = only_consumer((product if add is None else add).outputs[0], "QuantizeLinear")
        if data is None or Grid.of(data) is None or weight is None or quantize is None or not _is_by_column(weight):
            return None
        if add is None:
            return cls(product, data, weight, None, quantize)
        bias = other_input(add, product.outputs[0])
        bias_O = constant(bias)
        is_by_output = bias_O is not None and bias_O.shape == _integers(weight).shape[1:]
        return cls(product, data, weight, bias, quantize) if is_by_output else None

    def rewrite(self, shared: _Shared) -> None:
        """Put one operator in the place of the product and the addition, under the name of the product."""
        sizes = known_shape(source(self.data))
        is_of_matrices, is_wide = sizes is not None and len(sizes) == 2, len(_integers(self.weight)) >= _WIDE
        if (is_of_matrices or is_wide) and self.bias is None:
            return
        if is_of_matrices:
            self._rewrite_on_matrices(self.data)
        elif is_wide:
            self._rewrite_on_rows(shared, sizes)
        elif sizes is not None and len(sizes) in _CONVOLVED_AXES and not shared.has_batch_inside(sizes):
            self._rewrite_on_sequences(shared, self.data, len(sizes))
        else:
            rows = shared.rows(self.data, self.product, sizes, len(_integers(self.weight)))
            vector = self._output_shape(shared, sizes)
            insert_restoring(self._rewrite_on_sequences(shared, rows, 3), _ROWS, "Reshape", vector)

    def _rewrite_on_rows(self, shared: _Shared, sizes: _Sizes | None) -> None:
        rows = shared.reshaped(self.data, self.product, (-1, len(_integers(self.weight))))
        vector = self._output_shape(shared, sizes)
        self._rewrite_on_matrices(rows)
        insert_restoring(self.quantize.outputs[0], _ROWS, "Reshape", vector)

    def _output_shape(self, shared: _Shared, sizes: _Sizes | None) -> ir.Value:
        return shared.vector(source(self.data), sizes, _integers(self.weight).shape[1], self.product)

    def _rewrite_on_matrices(self, data: ir.Node) -> None:
        inputs = [data.outputs[0], self.weight.outputs[0], self.bias]
        self._replace_by(insert_node(self.product, "Gemm", inputs, alpha=1.0, beta=1.0))

    def _rewrite_on_sequences(self, shared: _Shared, data: ir.Node, num_axes: int) -> ir.Value:
        images = shared.channels_first(data, self.product, num_axes)
        weight = shared.kernel(self.weight, self.product, num_axes - 2)
        bias = [] if self.bias is None else [self.bias]
        size = (1,) * (num_axes - 2)
        self._replace_by(insert_node(self.product, "Conv", [images, weight, *bias], kernel_shape=size))
        return insert_restoring(self.quantize.outputs[0], _CHANNELS_FIRST, "Transpose", perm=channels_last(num_axes))

    def _replace_by(self, layer: ir.Node) -> None:
        layer.name = self.product.name
        self.quantize.replace_input_with(0, layer.outputs[0])


def _is_by_column(weight: ir.Node) -> bool:
    """Return whether weights have one scale, or one for each column, as integer kernels of a product take them."""
    integers, scales = (constant(value) for value in weight.inputs[:2])
    if integers is None or scales is None or integers.ndim != 2:
        return False
    return scales.size == 1 or int_attribute(weight, "axis", (1,)) in ((1,), (-1,))


def _integers(weight: ir.Node) -> Array:
    content = constant(weight.inputs[0])
    assert content is not None
    return content


class _Shared:
    """Inserts what stands around layers, once for all that are alike."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._made: dict[Hashable, ir.Value] = {}
        self._batch_sizes = {sizes[0] for value in graph.inputs if (sizes := known_shape(value))} - {None}
        """Of the graph's inputs: a symbol, or a number."""

    def has_batch_inside(self, sizes: _Sizes) -> bool:
        """Return whether samples lie along another axis than the first, as in `nn.TransformerEncoder` by default.

        A convolution would take the positions of a sequence for samples of one position each: 3.7 times as slow.
        """
        if sizes[0] in self._batch_sizes:
            return False
        # Shape inference may have lost the symbol of the inputs' first axis.
        is_unknown_inside = isinstance(sizes[0], int) and not all(isinstance(size, int) for size in sizes[1:-1])
        return is_unknown_inside or not self._batch_sizes.isdisjoint(sizes[1:-1])

    def channels_first(self, data: ir.Node, before: ir.Node, num_axes: int) -> ir.Value:
        """Return what a DequantizeLinear returns, with its last axis behind the first one."""
        integers = source(data)
        key = ("channels first", integers)
        if key not in self._made:
            transposed = insert_node(before, "Transpose", [integers], perm=channels_first(num_axes)).outputs[0]
            transposed.name = f"{integers.name}{_CHANNELS_FIRST}_again"  # its layer may have been written so, too
            self._made[key] = insert_node(before, "DequantizeLinear", [transposed, *data.inputs[1:]]).outputs[0]
        return self._made[key]

    def kernel(self, weight: ir.Node, before: ir.Node, num_axes: int) -> ir.Value:
        """Return weights (I, O) as those of a convolution over so many axes: (O, I, 1, ...)."""
        key = ("kernel", *weight.inputs, num_axes)
        if key not in self._made:
            content_OI = _integers(weight).T
            name = str(source(weight).name).removesuffix(_TRANSPOSED)
            kernel = add_initializer(self._graph, name, content_OI.reshape(*content_OI.shape, *(1,) * num_axes))
            inputs = [kernel, *weight.inputs[1:]]
            self._made[key] = insert_node(before, "DequantizeLinear", inputs, axis=0).outputs[0]
        return self._made[key]

    def rows(self, data: ir.Node, before: ir.Node, sizes: _Sizes | None, num_inputs: int) -> ir.Node:
        """Return a DequantizeLinear of the same integers with three axes, of all samples together if it must be."""
        middle = [None] if sizes is None or self.has_batch_inside(sizes) else sizes[1:-1]
        known = [size for size in middle if isinstance(size, int)]
        shape = (-1, prod(known), num_inputs) if len(known) == len(middle) else (1, -1, num_inputs)
        return self.reshaped(data, before, shape)

    def reshaped(self, data: ir.Node, before: ir.Node, shape: Sequence[int]) -> ir.Node:
        """Return a DequantizeLinear of the same integers in another shape."""
        integers = source(data)
        key = ("reshaped", integers, *shape)
        if key not in self._made:
            rows = insert_reshape(before, integers, shape)
            rows.name = f"{integers.name}{_ROWS}_again"  # as above
            self._made[key] = insert_node(before, "DequantizeLinear", [rows, *data.inputs[1:]]).outputs[0]
        dequantize = self._made[key].producer()
        assert dequantize is not None
        return dequantize

    def vector(self, data: ir.Value, sizes: _Sizes | None, num_outputs: int, before: ir.Node) -> ir.Value:
        """Return the shape of a layer's output: that of its input, which may be known, with O as the last axis."""
        leading = None if sizes is None else tuple(sizes[:-1])
        if leading is not None and sum(not isinstance(size, int) for size in leading) <= 1:
            return self._constant((*(size if isinstance(size, int) else -1 for size in leading), num_outputs))
        # Axes of one symbol have one size.
        key: Hashable = ("leading", data if leading is None or None in leading else leading)
        if key not in self._made:
            self._made[key] = insert_node(before, "Shape", [data], start=0, end=-1).outputs[0]
        if (key, num_outputs) not in self._made:
            parts = [self._made[key], self._constant((num_outputs,))]
            self._made[key, num_outputs] = insert_node(before, "Concat", parts, axis=0).outputs[0]
        return self._made[key, num_outputs]

    def _constant(self, sizes: Sequence[int]) -> ir.Value:
        key = ("constant", *sizes)
        if key not in self._made:
            name = "shape." + ".".join(str(size) for size in sizes)
            self._made[key] = add_initializer(self._graph, name, np.array(sizes, np.int64))
        return self._made[key]
