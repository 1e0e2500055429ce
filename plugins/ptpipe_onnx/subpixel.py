"""Transposed convolutions as convolutions whose channels become places: ONNX Runtime (1.32) has no integer kernel for
ConvTranspose, and one for each of these.

Output s q + r of a transposed convolution with stride s reads the inputs q - d through the taps s d + r + p of its
kernel (p: padding). Each r is a convolution of its own: s^2 of them, in two dimensions, side by side are one with s^2
times as many channels, whose kernel spans all d, with zeros for taps that there are not. DepthToSpace interleaves its
outputs. It is exactly the same sum (W. Shi et al., arXiv 1609.07009).

The file stores the kernel as it is, and operators that arrange it, which runtimes compute when they load the file: with
its zeros, one of 4 x 4 would take 2.25 times the bytes.

Shape legend: I input channels, O output channels, H and W height and width of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import (
    Array,
    add_initializer,
    constant,
    insert_behind,
    insert_node,
    int_attribute,
    nodes,
    only_consumer,
    owns_weight,
    producer,
    replace,
    source,
    store,
)

_ONES = (1, 1)
_ORDER = (1, 3, 5, 0, 2, 4)
"""From I, O, and taps and places of each axis, to O, places, I, taps."""


@dataclass(frozen=True)
class _Axis:
    """How a kernel is arranged along height or width."""

    added: tuple[int, int]
    """Zeros in front of its taps and behind them."""
    num_taps: int
    pads: tuple[int, int]
    """Of the convolution."""

    @classmethod
    def of(cls, size: int, stride: int, pads: tuple[int, int], output_padding: int) -> _Axis | None:
        """Return None if the output is not `stride` times as long as the input."""
        nearest, furthest = -((stride - 1 + pads[0]) // stride), (size - 1 - pads[0]) // stride
        if size - sum(pads) + output_padding != stride:
            return None
        num_taps = furthest - nearest + 1
        before = -stride * nearest - pads[0]
        return cls((before, stride * num_taps - before - size), num_taps, (furthest, -nearest))


@dataclass(frozen=True)
class Subpixel:
    """A convolution that computes what a transposed one does, to be interleaved by `stride`."""

    stride: int
    height: _Axis
    width: _Axis

    @classmethod
    def of(
        cls, kernel_HW: Sequence[int], strides: Sequence[int], pads: Sequence[int], output_padding: Sequence[int]
    ) -> Subpixel | None:
        """Return the convolution; None if the output is not `stride` times the input, in both dimensions alike.

        `pads`: top, left, bottom, right. Dilations and groups are 1.
        """
        if len(kernel_HW) != 2 or strides[0] != strides[1]:
            return None
        height, width = (
            _Axis.of(kernel_HW[axis], strides[0], (pads[axis], pads[2 + axis]), output_padding[axis])
            for axis in range(2)
        )
        return None if height is None or width is None else cls(strides[0], height, width)

    @property
    def pads(self) -> tuple[int, ...]:
        """As Conv takes them."""
        return (self.height.pads[0], self.width.pads[0], self.height.pads[1], self.width.pads[1])

    @property
    def repeats(self) -> int:
        """How many of its output channels, one behind the other, belong to an original one."""
        return self.stride**2

    def arranged(self, weight_IOHW: Array) -> Array:
        """Return the weight of the convolution."""
        num_inputs, num_outputs = weight_IOHW.shape[:2]
        added = ((0, 0), (0, 0), self.height.added, self.width.added)
        shape = (num_inputs, num_outputs, self.height.num_taps, self.stride, self.width.num_taps, self.stride)
        taps = np.flip(np.pad(weight_IOHW, added).reshape(shape), (2, 4))
        return taps.transpose(_ORDER).reshape(-1, num_inputs, self.height.num_taps, self.width.num_taps)

    def insert_arranged(self, graph: ir.Graph, weight: ir.Value, before: ir.Node) -> ir.Value:
        """Insert the operators that arrange a weight in front of a node; return their result."""

        def apply(op_type: str, value: ir.Value, *lists: Sequence[int], **attributes: Any) -> ir.Value:
            operands = [add_initializer(graph, "arrangement", np.array(numbers, np.int64)) for numbers in lists]
            return insert_node(before, op_type, [value, *operands], **attributes).outputs[0]

        content = constant(weight)
        assert content is not None
        num_inputs, num_outputs = content.shape[:2]
        ends = [(self.height.added[end], self.width.added[end]) for end in range(2)]
        value = weight
        if any(map(any, ends)):
            value = apply("Pad", value, (0, 0, *ends[0], 0, 0, *ends[1]))
        axes = (self.height.num_taps, self.stride, self.width.num_taps, self.stride)
        value = apply("Reshape", value, (num_inputs, num_outputs, *axes))
        if self.height.num_taps * self.width.num_taps > 1:
            last = np.iinfo(np.int64)
            value = apply("Slice", value, (-1, -1), (last.min, last.min), (2, 4), (-1, -1))
        value = apply("Transpose", value, perm=_ORDER)
        return apply(
            "Reshape", value, (num_outputs * self.repeats, num_inputs, self.height.num_taps, self.width.num_taps)
        )


def trimmed(weight_IOHW: Array, pads: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """Return a kernel without the zeros in front that only padding makes room for, and the pads that are left.

    `int8.transposed` widens kernels so.
    """
    left = list(pads)
    for axis in range(weight_IOHW.ndim - 2):
        while left[axis] and weight_IOHW.shape[2 + axis] > 1 and not weight_IOHW.take(0, 2 + axis).any():
            weight_IOHW, left[axis] = np.delete(weight_IOHW, 0, 2 + axis), left[axis] - 1
    return weight_IOHW, tuple(left)


def evaluated(value: ir.Value | None) -> Array | None:
    """Return a weight that the operators of `Subpixel.insert_arranged` may have arranged; None if it is no constant."""
    node = producer(value, "Pad", "Reshape", "Slice", "Transpose")
    content = constant(value) if node is None else evaluated(node.inputs[0])
    if node is None or content is None:
        return content
    if node.op_type == "Transpose":
        return content.transpose(node.attributes["perm"].value)
    operands = [operand for value in node.inputs[1:] if (operand := constant(value)) is not None]
    if len(operands) != len(node.inputs) - 1:
        return None
    if node.op_type == "Reshape":
        return content.reshape(operands[0])
    if node.op_type == "Slice":
        starts, _, axes, steps = operands
        return np.flip(content, tuple(axes)) if {*starts, *steps} == {-1} else None
    return np.pad(content, operands[0].reshape(2, -1).T)


def stored_name(value: ir.Value) -> str:
    """Return the name of the initializer that a weight is arranged from."""
    node = value.producer()
    return str(value.name) if node is None else stored_name(source(node))


def write_as_convolutions(graph: ir.Graph) -> None:
    """Rewrite int8 transposed convolutions, between DequantizeLinear and QuantizeLinear, in place."""
    for node in nodes(graph, "ConvTranspose"):
        data, weight = (producer(value, "DequantizeLinear") for value in node.inputs[:2])
        quantize = only_consumer(node.outputs[0], "QuantizeLinear")
        if data is not None and weight is not None and quantize is not None and _is_plain(node, weight):
            _rewrite(graph, node, quantize, weight)


def _is_plain(node: ir.Node, weight: ir.Node) -> bool:
    """Return whether a layer has one group, no dilation, and a constant weight with one scale, of which 0 is zero."""
    integers, scale, zero_point = (constant(weight.inputs[index]) for index in range(3))
    if integers is None or scale is None or zero_point is None:
        return False
    is_dense = int_attribute(node, "group", (1,)) == (1,)
    return is_dense and scale.size == 1 and not zero_point.any() and set(int_attribute(node, "dilations", (1,))) == {1}


def _rewrite(graph: ir.Graph, node: ir.Node, quantize: ir.Node, weight: ir.Node) -> None:
    stored = source(weight)
    content = constant(stored)
    assert content is not None
    kernel, pads = trimmed(content, int_attribute(node, "pads", (0,) * 2 * (content.ndim - 2)))
    strides, added = int_attribute(node, "strides", _ONES), int_attribute(node, "output_padding", (0, 0))
    form = Subpixel.of(kernel.shape[2:], strides, pads, added)
    if form is None:
        return
    if kernel.shape != content.shape and owns_weight(node, weight):
        store(stored, kernel)
    elif kernel.shape != content.shape:
        stored = add_initializer(graph, str(stored.name), kernel)
    integers = form.insert_arranged(graph, stored, node)
    floats = insert_node(node, "DequantizeLinear", [integers, *weight.inputs[1:]]).outputs[0]
    inputs = [node.inputs[0], floats]
    bias_O = constant(node.inputs[2]) if len(node.inputs) == 3 else None
    if bias_O is not None:
        inputs.append(add_initializer(graph, str(source(node, 2).name), np.repeat(bias_O, form.repeats)))
    size = (form.height.num_taps, form.width.num_taps)
    replace(node.outputs[0], insert_node(node, "Conv", inputs, pads=form.pads, kernel_shape=size).outputs[0])
    graph.remove(node, safe=True)
    if form.stride > 1:
        insert_behind(quantize.outputs[0], "DepthToSpace", blocksize=form.stride, mode="CRD")
