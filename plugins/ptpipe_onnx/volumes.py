"""Graph pass that writes int8 convolutions over volumes as convolutions over images, for which there are kernels.

ONNX Runtime (1.32) computes QLinearConv over three axes by a loop over all values under the kernel. A convolution over
depth, height and width is one over height and width alone, whose input channels are those of the slices under the
kernel, one slice behind the other: the same products, added up to the same integer.

Figures: decision 0053. Shape legend: O output channels, I input channels; D, H, W depth, height and width of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    owns_weight,
    producer,
    replace,
    source,
    store,
)

_DEPTH, _CHANNELS = 1, 2
"""Axes of samples of slices."""
_SWAPPED = (0, 2, 1, 3, 4)
"""Order of axes that exchanges channels and depth, and that undoes it."""
_SLICES, _AS_VOLUME = ".slices", ".images"
"""Suffixes of names."""


@dataclass(frozen=True)
class KernelAxis:
    """An axis of a kernel, and how it is applied along that axis."""

    size: int
    stride: int
    dilation: int
    pads: tuple[int, int]

    def num_outputs(self, num_slices: int) -> int:
        """Return the number of positions over a volume of so many slices."""
        return (num_slices + sum(self.pads) - self.dilation * (self.size - 1) - 1) // self.stride + 1

    def ranges(self, num_outputs: int) -> list[tuple[int, int]]:
        """Return, for each slice of the kernel, the first slice that it meets, and the end of all of them."""
        starts = [number * self.dilation for number in range(self.size)]
        return [(start, start + self.stride * (num_outputs - 1) + 1) for start in starts]


def arranged(weight_OIDHW: Array) -> Array:
    """Return a weight as that of a convolution over images: (O, D I, H, W)."""
    swapped = weight_OIDHW.transpose(_SWAPPED)
    return np.ascontiguousarray(swapped).reshape(len(swapped), -1, *swapped.shape[3:])


def write_volumes_as_images(graph: ir.Graph) -> None:
    """Rewrite DQ-Conv-Q over volumes of known sizes, in place; those with groups stay."""
    for convolution in nodes(graph, "Conv"):
        data, weight = (producer(value, "DequantizeLinear") for value in convolution.inputs[:2])
        integers = None if weight is None else constant(weight.inputs[0])
        quantize = only_consumer(convolution.outputs[0], "QuantizeLinear")
        if data is None or weight is None or integers is None or integers.ndim != 5 or quantize is None:
            continue
        sizes = known_shape(source(data))
        known = [size for size in (sizes or ())[2:] if isinstance(size, int)]
        is_padded_so = convolution.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
        is_plain = is_padded_so and int_attribute(convolution, "group", (1,)) == (1,)
        if len(known) == 3 and is_plain:
            _Rewriting(graph, convolution, data, weight, integers).write(known, quantize)


@dataclass(frozen=True)
class _Rewriting:
    """Of one convolution."""

    graph: ir.Graph
    convolution: ir.Node
    data: ir.Node
    weight: ir.Node
    weight_OIDHW: Array

    def write(self, sizes: Sequence[int], quantize: ir.Node) -> None:
        """Rewrite it. `sizes`: depth, height and width of its input."""
        pads, strides, dilations = (
            int_attribute(self.convolution, name, (default,) * length)
            for name, default, length in (("pads", 0, 6), ("strides", 1, 3), ("dilations", 1, 3))
        )
        shape = self.weight_OIDHW.shape[2:]
        depth, *others = map(KernelAxis, shape, strides, dilations, zip(pads[:3], pads[3:], strict=True))
        num_outputs = [axis.num_outputs(size) for axis, size in zip((depth, *others), sizes, strict=True)]
        images = self._images(depth, num_outputs[0], sizes[1:])
        floats = insert_node(self.convolution, "DequantizeLinear", [images, *self.data.inputs[1:]]).outputs[0]
        written = insert_node(
            self.convolution,
            "Conv",
            [floats, self._kernel(), *self.convolution.inputs[2:]],
            kernel_shape=shape[1:],
            pads=(*pads[1:3], *pads[4:]),
            strides=strides[1:],
            dilations=dilations[1:],
        )
        written.name = self.convolution.name
        replace(self.convolution.outputs[0], written.outputs[0])
        self.graph.remove(self.convolution, safe=True)
        self._restore(quantize.outputs[0], num_outputs)

    def _images(self, axis: KernelAxis, num_outputs: int, size_HW: Sequence[int]) -> ir.Value:
        """Return the integers under each position of the kernel along the depth, (N outputs, D I, height, width)."""
        integers, before, num_inputs = source(self.data), self.convolution, self.weight_OIDHW.shape[1]
        slices = insert_node(before, "Transpose", [integers], perm=_SWAPPED).outputs[0]
        if any(axis.pads):
            ends = self._constant((0, axis.pads[0], 0, 0, 0, 0, axis.pads[1], 0, 0, 0))
            slices = insert_node(before, "Pad", [slices, ends, self.data.inputs[2]]).outputs[0]
        along = self._constant((_DEPTH,))
        parts = [
            insert_node(
                before,
                "Slice",
                [slices, self._constant((start,)), self._constant((end,)), along, self._constant((axis.stride,))],
            ).outputs[0]
            for start, end in axis.ranges(num_outputs)
        ]
        joined = insert_node(before, "Concat", parts, axis=_CHANNELS).outputs[0]
        images = insert_reshape(before, joined, (-1, axis.size * num_inputs, *size_HW))
        number = len(integers.uses())
        images.name = f"{integers.name}{_SLICES}.{number}"  # several convolutions may read the same integers
        return images

    def _kernel(self) -> ir.Value:
        kernel, stored = arranged(self.weight_OIDHW), source(self.weight)
        if owns_weight(self.convolution, self.weight):
            store(stored, kernel)
            return self.weight.outputs[0]
        stored = add_initializer(self.graph, str(stored.name), kernel)
        inputs = [stored, *self.weight.inputs[1:]]
        axis = int_attribute(self.weight, "axis", (1,))[0]
        return insert_node(self.convolution, "DequantizeLinear", inputs, axis=axis).outputs[0]

    def _restore(self, integers: ir.Value, num_outputs: Sequence[int]) -> None:
        """Make a volume of the outputs of all positions again. `num_outputs`: its depth, height and width."""
        volume = insert_restoring(integers, _AS_VOLUME, "Transpose", perm=_SWAPPED)
        transpose = producer(volume)
        assert transpose is not None
        depth, *size_HW = num_outputs
        slices = insert_reshape(transpose, source(transpose), (-1, depth, len(self.weight_OIDHW), *size_HW))
        transpose.replace_input_with(0, slices)

    def _constant(self, numbers: Sequence[int]) -> ir.Value:
        return add_initializer(self.graph, "volumes.numbers", np.array(numbers, np.int64))


@dataclass(frozen=True)
class VolumeConvolution:
    """A convolution over volumes as the pass writes it.

    Transpose-Pad-Slices-Concat-Reshape-DQ-Conv-Q-Reshape-Transpose.
    """

    before: ir.Node
    """The Transpose of the input."""
    pad: ir.Node | None
    axis: KernelAxis
    data: ir.Node
    weight: ir.Node
    quantize: ir.Node
    behind: ir.Node
    """The Transpose of the output."""

    @classmethod
    def of(cls, convolution: ir.Node) -> VolumeConvolution | None:
        """Return what a convolution is; None if it is none."""
        data, weight = (producer(value, "DequantizeLinear") for value in convolution.inputs[:2])
        quantize = only_consumer(convolution.outputs[0], "QuantizeLinear")
        slices = None if quantize is None else only_consumer(quantize.outputs[0], "Reshape")
        behind = None if slices is None else only_consumer(slices.outputs[0], "Transpose")
        images = None if data is None else producer(data.inputs[0], "Reshape")
        joined = None if images is None else producer(images.inputs[0], "Concat")
        if data is None or weight is None or quantize is None or behind is None or joined is None:
            return None
        found = _depth_of(joined)
        before = None if found is None else producer(found[0], "Transpose")
        pad = None if found is None else producer(found[0], "Pad")
        ends = np.zeros(10, int)
        if pad is not None and (own := constant(pad.inputs[1])) is not None:
            before, ends = producer(pad.inputs[0], "Transpose"), own
        is_swapped = before is not None and all(int_attribute(of, "perm", ()) == _SWAPPED for of in (before, behind))
        if found is None or before is None or not is_swapped or np.delete(ends, (1, 6)).any():
            return None
        axis = KernelAxis(*found[1:], (int(ends[1]), int(ends[6])))
        return cls(before, pad, axis, data, weight, quantize, behind)

    def write_as_volume(self, graph: ir.Graph, convolution: ir.Node) -> None:
        """Undo the pass, in place."""
        kernel = constant(self.weight.inputs[0])
        assert kernel is not None
        restored = kernel.reshape(len(kernel), self.axis.size, -1, *kernel.shape[2:]).transpose(_SWAPPED)
        stored = add_initializer(graph, str(source(self.weight).name), restored)
        operands = [
            insert_node(convolution, "DequantizeLinear", [self.before.inputs[0], *self.data.inputs[1:]]).outputs[0],
            insert_node(convolution, "DequantizeLinear", [stored, *self.weight.inputs[1:]], axis=0).outputs[0],
        ]
        pads, strides, dilations = (
            int_attribute(convolution, name, (default,) * length)
            for name, default, length in (("pads", 0, 4), ("strides", 1, 2), ("dilations", 1, 2))
        )
        axis = self.axis
        volume = insert_node(
            convolution,
            "Conv",
            [*operands, *convolution.inputs[2:]],
            kernel_shape=restored.shape[2:],
            pads=(axis.pads[0], *pads[:2], axis.pads[1], *pads[2:]),
            strides=(axis.stride, *strides),
            dilations=(axis.dilation, *dilations),
        )
        self.quantize.replace_input_with(0, volume.outputs[0])
        replace(self.behind.outputs[0], self.quantize.outputs[0])


def _depth_of(joined: ir.Node) -> tuple[ir.Value, int, int, int] | None:
    """Return what the parts of a Concat are slices of, and size, stride and dilation of the kernel they lie under."""
    parts = [producer(value, "Slice") for value in joined.inputs]
    operands = [[constant(value) for value in part.inputs[1:]] for part in parts if part is not None]
    if int_attribute(joined, "axis", (0,)) != (_CHANNELS,) or len(operands) < len(parts):
        return None
    numbers = [[-1 if operand is None or operand.size != 1 else operand.item() for operand in of] for of in operands]
    if any(len(of) != 4 or -1 in of for of in numbers):
        return None
    starts, ends, axes, steps = np.array(numbers).T
    dilation = int(starts[1] - starts[0]) if len(starts) > 1 else 1
    whole, *others = {part.inputs[0] for part in parts if part is not None}
    is_kernel = np.array_equal(starts, dilation * np.arange(len(starts))) and len(set(ends - starts)) == 1
    if whole is None or others or not is_kernel or set(axes) != {_DEPTH} or len(set(steps)) > 1:
        return None
    return whole, len(starts), int(steps[0]), dilation


def write_as_volumes(graph: ir.Graph) -> bool:
    """Undo the pass, in place; return whether there was anything. For runtimes that compute volumes as they are."""
    layers = {node: layer for node in nodes(graph, "Conv") if (layer := VolumeConvolution.of(node)) is not None}
    for convolution, layer in layers.items():
        layer.write_as_volume(graph, convolution)
    return bool(layers)
