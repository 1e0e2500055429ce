"""Transposed convolutions as convolutions whose channels become places: ONNX Runtime (1.32) has no integer kernel for
ConvTranspose, and one for each of these.

Output s q + r of a transposed convolution with stride s reads the inputs q - d through the taps s d + r + p of its
kernel (p: padding). Each r is a convolution of its own: s of them, or s^2 in two dimensions, side by side are one with
so many times as many channels, whose kernel spans all d, with zeros for taps that there are not. It is exactly the same
sum (W. Shi et al., arXiv 1609.07009). In two dimensions, DepthToSpace interleaves its outputs. In one, the channels of
a place are side by side: with channels last, in which ONNX Runtime computes, interleaving them is reshaping.

The file stores the kernel as it is, and operators that arrange it, which runtimes compute when they load the file: with
its zeros, one of 4 x 4 would take 2.25 times the bytes.

Shape legend: I input channels, O output channels, K the axes of a kernel, one or two.
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
    insert_node,
    insert_restoring,
    int_attribute,
    nodes,
    only_consumer,
    owns_weight,
    producer,
    replace,
    source,
    store,
)
from ptpipe_onnx.linear_pass import channels_first, channels_last

_TO_LAST, _TO_FIRST = channels_last(3), channels_first(3)
"""Orders of axes that bring channels behind places, and back."""
_ORDERS = {1: (3, 1, 0, 2), 2: (1, 3, 5, 0, 2, 4)}
"""From I, O, and taps and places of each axis: to places, O, I, taps, and to O, places, I, taps."""


@dataclass(frozen=True)
class _Axis:
    """How a kernel is arranged along an axis."""

    added: tuple[int, int]
    """Zeros in front of its taps and behind them."""
    num_taps: int
    pads: tuple[int, int]
    """Of the convolution."""
    num_cropped: int
    """How many of the outputs, behind the others, the transposed convolution does not have."""

    @classmethod
    def of(cls, size: int, stride: int, pads: tuple[int, int], output_padding: int) -> _Axis | None:
        """Return None where padding crops what the convolution would have to compute from fewer inputs."""
        nearest, furthest = -((stride - 1 + pads[0]) // stride), (size - 1 - pads[0]) // stride
        longer_by = size - sum(pads) + output_padding - stride  # than `stride` times the input
        num_places = -(-longer_by // stride)
        if min(furthest, num_places - nearest) < 0:
            return None
        num_taps = furthest - nearest + 1
        before = -stride * nearest - pads[0]
        added = (before, stride * num_taps - before - size)
        return cls(added, num_taps, (furthest, num_places - nearest), stride * num_places - longer_by)


@dataclass(frozen=True)
class Subpixel:
    """A convolution that computes what a transposed one does, to be interleaved by `stride`."""

    stride: int
    axes: tuple[_Axis, ...]

    @classmethod
    def of(
        cls, kernel_K: Sequence[int], strides: Sequence[int], pads: Sequence[int], output_padding: Sequence[int]
    ) -> Subpixel | None:
        """Return the convolution; None where there is none, or strides differ.

        `pads`: of all axes in front, then behind. Dilations and groups are 1.
        """
        num_axes = len(kernel_K)
        if num_axes not in _ORDERS or len(set(strides)) > 1:
            return None
        axes = [
            _Axis.of(kernel_K[axis], strides[0], (pads[axis], pads[num_axes + axis]), output_padding[axis])
            for axis in range(num_axes)
        ]
        found = tuple(axis for axis in axes if axis is not None)
        return cls(strides[0], found) if len(found) == num_axes else None

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """As Conv takes it."""
        return tuple(axis.num_taps for axis in self.axes)

    @property
    def pads(self) -> tuple[int, ...]:
        """As Conv takes them."""
        return tuple(axis.pads[end] for end in range(2) for axis in self.axes)

    def repeated(self, bias_O: Array) -> Array:
        """Return the bias of the convolution."""
        return np.tile(bias_O, self.stride) if len(self.axes) == 1 else np.repeat(bias_O, self.stride**2)

    def arranged(self, weight_IOK: Array) -> Array:
        """Return the weight of the convolution."""
        num_inputs, num_outputs = weight_IOK.shape[:2]
        added = ((0, 0), (0, 0), *(axis.added for axis in self.axes))
        taps = np.flip(np.pad(weight_IOK, added).reshape(num_inputs, num_outputs, *self._places), self._flipped)
        return taps.transpose(_ORDERS[len(self.axes)]).reshape(-1, num_inputs, *self.kernel_shape)

    @property
    def _places(self) -> tuple[int, ...]:
        return tuple(size for axis in self.axes for size in (axis.num_taps, self.stride))

    @property
    def _flipped(self) -> tuple[int, ...]:
        """The axes of taps, where `_places` stand behind the channels."""
        return tuple(range(2, 2 + 2 * len(self.axes), 2))

    def insert_arranged(self, graph: ir.Graph, weight: ir.Value, before: ir.Node) -> ir.Value:
        """Insert the operators that arrange a weight in front of a node; return their result."""

        def apply(op_type: str, value: ir.Value, *lists: Sequence[int], **attributes: Any) -> ir.Value:
            operands = [add_initializer(graph, "arrangement", np.array(numbers, np.int64)) for numbers in lists]
            return insert_node(before, op_type, [value, *operands], **attributes).outputs[0]

        content, num_axes = constant(weight), len(self.axes)
        assert content is not None
        num_inputs, num_outputs = content.shape[:2]
        ends = [[axis.added[end] for axis in self.axes] for end in range(2)]
        value = weight
        if any(map(any, ends)):
            value = apply("Pad", value, (0, 0, *ends[0], 0, 0, *ends[1]))
        value = apply("Reshape", value, (num_inputs, num_outputs, *self._places))
        if max(self.kernel_shape) > 1:
            last = np.iinfo(np.int64).min
            value = apply("Slice", value, (-1,) * num_axes, (last,) * num_axes, self._flipped, (-1,) * num_axes)
        value = apply("Transpose", value, perm=_ORDERS[num_axes])
        return apply("Reshape", value, (num_outputs * self.stride**num_axes, num_inputs, *self.kernel_shape))

    @property
    def _crop(self) -> list[list[int]]:
        """Starts, ends and axes of the outputs that the transposed convolution has; empty if it has all."""
        ends = {index: -axis.num_cropped for index, axis in enumerate(self.axes, 2) if axis.num_cropped}
        return [[0] * len(ends), list(ends.values()), list(ends)] if ends else []

    def insert_interleaving(self, graph: ir.Graph, integers: ir.Value, num_outputs: int) -> None:
        """Insert the operators that interleave and crop the outputs of the convolution, in front of all readers."""
        if len(self.axes) == 2:
            interleaved = insert_restoring(integers, ".by_place", "DepthToSpace", blocksize=self.stride, mode="CRD")
        else:
            interleaved = self._interleave_sequence(graph, integers, num_outputs)
        if self._crop:
            ends = [add_initializer(graph, "crop", np.array(numbers, np.int64)) for numbers in self._crop]
            insert_restoring(interleaved, ".uncropped", "Slice", *ends)

    def _interleave_sequence(self, graph: ir.Graph, integers: ir.Value, num_outputs: int) -> ir.Value:
        shape = add_initializer(graph, f"{integers.name}.shape", np.array([0, -1, num_outputs]))
        first = insert_restoring(integers, ".by_place", "Transpose", perm=_TO_LAST)
        second = insert_restoring(first, ".channels_last", "Reshape", shape)
        return insert_restoring(second, ".interleaved", "Transpose", perm=_TO_FIRST)

    def is_interleaved(self, quantize: ir.Node, num_outputs: int) -> bool:
        """Return whether a file has the operators of `insert_interleaving` behind a QuantizeLinear."""
        types = ["DepthToSpace"] if len(self.axes) == 2 else ["Transpose", "Reshape", "Transpose"]
        found = [quantize]
        for op_type in types + ["Slice"] * bool(self._crop):
            reader = only_consumer(found[-1].outputs[0], op_type)
            if reader is None:
                return False
            found.append(reader)
        numbers = [[] if (own := constant(operand)) is None else own.tolist() for operand in found[-1].inputs[1:]]
        if self._crop and numbers != self._crop:
            return False
        if len(self.axes) == 2:
            behind = found[1]
            return (int_attribute(behind, "blocksize", ()), behind.attributes["mode"].value) == ((self.stride,), "CRD")
        shape = constant(found[2].inputs[1])
        orders = [int_attribute(found[index], "perm", ()) for index in (1, 3)]
        return orders == [_TO_LAST, _TO_FIRST] and shape is not None and shape.tolist() == [0, -1, num_outputs]


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
    """Return whether a layer has one group, no dilation, and a constant weight, of which 0 is zero.

    Its scales are those of output channels, or there is one.
    """
    integers, scales, zero_points = (constant(weight.inputs[index]) for index in range(3))
    if integers is None or scales is None or zero_points is None or zero_points.any():
        return False
    is_dense = int_attribute(node, "group", (1,)) == (1,)
    is_by_channel = scales.size == 1 or int_attribute(weight, "axis", (1,))[0] % integers.ndim == 1
    return is_dense and is_by_channel and set(int_attribute(node, "dilations", (1,))) == {1}


def _rewrite(graph: ir.Graph, node: ir.Node, quantize: ir.Node, weight: ir.Node) -> None:
    stored = source(weight)
    content = constant(stored)
    assert content is not None
    num_axes = content.ndim - 2
    kernel, pads = trimmed(content, int_attribute(node, "pads", (0,) * 2 * num_axes))
    strides = int_attribute(node, "strides", (1,) * num_axes)
    added = int_attribute(node, "output_padding", (0,) * num_axes)
    form = Subpixel.of(kernel.shape[2:], strides, pads, added)
    bias_O = _bias(node)
    if form is None or (bias_O is None and len(node.inputs) == 3):
        return
    if kernel.shape != content.shape and owns_weight(node, weight):
        store(stored, kernel)
    elif kernel.shape != content.shape:
        stored = add_initializer(graph, str(stored.name), kernel)
    integers = form.insert_arranged(graph, stored, node)
    grid = [_by_convolution(graph, source(weight, index), form) for index in (1, 2)]
    floats = insert_node(node, "DequantizeLinear", [integers, *grid], axis=0).outputs[0]
    inputs = [node.inputs[0], floats]
    if bias_O is not None:
        name = f"{source(node, 2).name}{'' if constant(node.inputs[2]) is not None else '.by_place'}"
        inputs.append(add_initializer(graph, name, form.repeated(bias_O)))
    convolution = insert_node(node, "Conv", inputs, pads=form.pads, kernel_shape=form.kernel_shape)
    replace(node.outputs[0], convolution.outputs[0])
    graph.remove(node, safe=True)
    if form.stride > 1:
        form.insert_interleaving(graph, quantize.outputs[0], kernel.shape[1])


def _bias(node: ir.Node) -> Array | None:
    """Return a constant bias, which a quantizer may have stored as integers."""
    value = node.inputs[2] if len(node.inputs) == 3 else None
    dequantize = producer(value, "DequantizeLinear")
    if dequantize is None:
        return constant(value)
    integers, scales = (constant(operand) for operand in dequantize.inputs[:2])
    return None if integers is None or scales is None else integers.astype(np.float32) * scales


def _by_convolution(graph: ir.Graph, stored: ir.Value, form: Subpixel) -> ir.Value:
    """Return scales or zero points of a weight as the convolution takes them; one alone has no axis."""
    content = constant(stored)
    assert content is not None
    if not content.ndim:
        return stored
    own = content.reshape(()) if content.size == 1 else form.repeated(content)
    return add_initializer(graph, str(stored.name), own)
