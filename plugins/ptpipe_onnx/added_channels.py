"""Graph passes that append channels of zeros to int8 convolutions: ONNX Runtime (1.32) then takes quicker kernels.

Figures: one thread, AMD EPYC, AVX-512 VNNI and, in parentheses, AVX2 alone. How they were measured: decision 0043.

Shape legend: O output channels, I input channels of a group, H and W height and width of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

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

_ALIGNMENT, _DEPTHWISE_ALIGNMENT = 4, 16
_MAX_PADDED_KERNEL = 9
"""Of a kernel's height times its width: on AVX2, larger ones lose by the padding."""
_MIN_DEPTHWISE_SIZE = 600
"""Of all kernels together: 67 channels of 3 x 3, 24 of 5 x 5. Smaller ones lose by the padding, on AVX2."""


def pad_channels(graph: ir.Graph) -> None:
    """Give small convolutions a multiple of four input channels: the additional ones have weight zero.

    Those of a network's input, mostly: where an integer kernel computes what a convolution reads, padding would cost.
    ONNX Runtime copies the channels under a kernel position after position, and copies four bytes quicker than three,
    or one. A 3 x 3 convolution of RGB images takes 0.43 to 0.68x (0.74 to 0.82x) the time, MobileNetV2 0.90x (0.97x).
    """
    padded: dict[ir.Node, ir.Value] = {}  # several convolutions may read the same integers
    for convolution in nodes(graph, "Conv"):
        data, weight = (producer(value, "DequantizeLinear") for value in convolution.inputs[:2])
        integers = None if weight is None else constant(weight.inputs[0])
        if data is None or weight is None or integers is None:
            continue
        is_dense = int_attribute(convolution, "group", (1,)) == (1,)
        if owns_weight(convolution, weight) and is_dense and _is_small(integers) and _is_rounded_alone(data):
            num_added = -integers.shape[1] % _ALIGNMENT
            if data not in padded:
                padded[data] = _padded_input(convolution, data, num_added)
            convolution.replace_input_with(0, padded[data])
            store(source(weight), padded_channels(integers, num_added))


def _is_rounded_alone(dequantize: ir.Node) -> bool:
    """Return whether these integers are rounded on their own, and not by the integer kernel that computes them."""
    quantize = producer(dequantize.inputs[0], "QuantizeLinear")
    computed = None if quantize is None else source(quantize).producer()
    before = () if computed is None else computed.inputs
    return quantize is not None and not any(producer(value, "DequantizeLinear") for value in before)


def _is_small(weight_OIHW: Array) -> bool:
    height_width = weight_OIHW.shape[2:]
    return len(height_width) == 2 and prod(height_width) <= _MAX_PADDED_KERNEL and weight_OIHW.shape[1] % _ALIGNMENT > 0


def pad_depthwise(graph: ir.Graph) -> None:
    """Give large depthwise convolutions a multiple of 16 channels, and drop the additional ones behind them.

    ONNX Runtime has a kernel for such numbers only. One of 5 x 5 and 120 channels takes 0.44x (0.80x) the time with
    both copies, MobileNetV3 0.87x (0.95x), MnasNet 0.85x (0.97x).
    """
    for convolution in nodes(graph, "Conv"):
        read = [node for value in convolution.inputs if (node := producer(value, "DequantizeLinear")) is not None]
        quantize = only_consumer(convolution.outputs[0], "QuantizeLinear")
        if len(read) < len(convolution.inputs) or quantize is None:
            continue
        data, weight, *_ = read
        integers = constant(weight.inputs[0])
        if integers is None or not _is_large_depthwise(convolution, integers) or not owns_weight(convolution, weight):
            continue
        num_channels, num_added = len(integers), -len(integers) % _DEPTHWISE_ALIGNMENT
        if num_added:
            convolution.replace_input_with(0, _padded_input(convolution, data, num_added))
            for dequantize in read[1:]:
                _pad_first_axis(graph, dequantize, num_added)
            convolution.attributes["group"] = ir.AttrInt64("group", num_channels + num_added)
            _drop_channels(graph, quantize, num_channels)


def _is_large_depthwise(convolution: ir.Node, weight_OIHW: Array) -> bool:
    is_depthwise = int_attribute(convolution, "group", (1,)) == weight_OIHW.shape[:1] and weight_OIHW.shape[1] == 1
    return is_depthwise and weight_OIHW.ndim == 4 and weight_OIHW.size >= _MIN_DEPTHWISE_SIZE


@dataclass(frozen=True)
class PaddedDepthwise:
    """A depthwise convolution as `pad_depthwise` writes it: Pad-DQ-Conv-Q-Slice."""

    pad: ir.Node
    data: ir.Node
    quantize: ir.Node
    dropped: ir.Node
    """The Slice."""
    num_channels: int
    """Without the additional ones."""
    num_added: int

    @classmethod
    def of(cls, convolution: ir.Node) -> PaddedDepthwise | None:
        """Return what a convolution is; None if it is none."""
        data = producer(convolution.inputs[0], "DequantizeLinear")
        pad = None if data is None else producer(data.inputs[0], "Pad")
        quantize = only_consumer(convolution.outputs[0], "QuantizeLinear")
        dropped = None if quantize is None else only_consumer(quantize.outputs[0], "Slice")
        weight = producer(convolution.inputs[1], "DequantizeLinear")
        if data is None or pad is None or quantize is None or dropped is None or weight is None:
            return None
        integers, pads = constant(weight.inputs[0]), constant(pad.inputs[1])
        operands = [constant(value) for value in dropped.inputs[1:]]
        if integers is None or pads is None or not _is_large_depthwise(convolution, integers) or len(operands) != 3:
            return None
        start, end, axis = (None if operand is None else operand.tolist() for operand in operands)
        if start != [0] or axis != [1] or end is None or len(end) != 1:
            return None
        written = cls(pad, data, quantize, dropped, end[0], len(integers) - end[0])
        return written if np.array_equal(pads, _pads(written.num_added)) else None

    def write_without(self, graph: ir.Graph, convolution: ir.Node) -> None:
        """Remove the additional channels, in place."""
        floats = insert_node(convolution, "DequantizeLinear", [self.pad.inputs[0], *self.data.inputs[1:]]).outputs[0]
        convolution.replace_input_with(0, floats)
        for value in convolution.inputs[1:]:
            dequantize = producer(value, "DequantizeLinear")
            for index, operand in enumerate(() if dequantize is None else dequantize.inputs):
                content = constant(operand)
                if dequantize is not None and operand is not None and content is not None and content.ndim:
                    kept = add_initializer(graph, str(operand.name), content[: self.num_channels])
                    dequantize.replace_input_with(index, kept)
        convolution.attributes["group"] = ir.AttrInt64("group", self.num_channels)
        replace(self.dropped.outputs[0], self.quantize.outputs[0])


def drop_depthwise_padding(graph: ir.Graph) -> bool:
    """Undo `pad_depthwise`, in place; return whether there was anything. For runtimes that it does not help."""
    layers = {node: layer for node in nodes(graph, "Conv") if (layer := PaddedDepthwise.of(node)) is not None}
    for convolution, layer in layers.items():
        layer.write_without(graph, convolution)
    return bool(layers)


def _pad_first_axis(graph: ir.Graph, dequantize: ir.Node, num_added: int) -> None:
    """Append zeros to integers, and to zero points; to scales their last one."""
    for index, value in enumerate(dequantize.inputs):
        content = constant(value)
        if value is None or content is None or content.ndim == 0:
            continue
        ends = [(0, num_added), *[(0, 0)] * (content.ndim - 1)]
        padded = np.pad(content, ends, mode="edge" if index == 1 else "constant")
        if len(value.uses()) == 1:
            store(value, padded)
        else:
            dequantize.replace_input_with(index, add_initializer(graph, str(value.name), padded))


def _drop_channels(graph: ir.Graph, quantize: ir.Node, num_kept: int) -> None:
    numbers = {"start": 0, f"{num_kept}": num_kept, "axis": 1}
    operands = [add_initializer(graph, f"channels.{name}", np.array([number])) for name, number in numbers.items()]
    insert_restoring(quantize.outputs[0], ".padded_output", "Slice", *operands)


def _padded_input(convolution: ir.Node, data: ir.Node, num_added: int) -> ir.Value:
    """Return the input of a convolution with so many channels of zeros behind it."""
    assert convolution.graph is not None
    integers, scale, zero_point = (source(data, index) for index in range(3))
    pads = add_initializer(convolution.graph, "channels.pads", _pads(num_added))
    padded = insert_node(convolution, "Pad", [integers, pads, zero_point]).outputs[0]
    padded.name = f"{integers.name}.padded"
    return insert_node(convolution, "DequantizeLinear", [padded, scale, zero_point]).outputs[0]


def _pads(num_added: int) -> Array:
    return np.array([0, 0, 0, 0, 0, num_added, 0, 0], np.int64)


def padded_channels(weight_OIHW: Array, num_added: int) -> Array:
    """Return a convolution's weight with zeros for so many further input channels."""
    return np.pad(weight_OIHW, ((0, 0), (0, num_added), (0, 0), (0, 0)))
