"""Graph pass for int8 depthwise convolutions that have several outputs for each channel, for ONNX Runtime (1.32).

Its integer kernel for depthwise convolutions takes one output for each channel; others are computed group after group:
48 channels of 56 x 56, with two outputs each under 7 x 7 and stride 2, take 3.8 ms. With each channel repeated in front
of it, the same convolution has one output for each, and takes 0.1 ms with the copies. Its weight stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import add_initializer, constant, insert_node, int_attribute, nodes, producer, source

_AXES = (3, 4)
"""Of the weights of convolutions over sequences and images."""


@dataclass(frozen=True)
class RepeatedChannels:
    """The channels that a convolution reads several times, one after another."""

    num_channels: int
    """Of the input before."""
    num_repetitions: int

    @classmethod
    def of(cls, convolution: ir.Node) -> RepeatedChannels | None:
        """Return how the input of a convolution is repeated, also in front of channels that are appended; or None."""
        data = producer(convolution.inputs[0], "DequantizeLinear")
        pad = None if data is None else producer(data.inputs[0], "Pad")
        before = pad or data
        gather = None if before is None else producer(before.inputs[0], "Gather")
        indices = None if gather is None else constant(gather.inputs[1])
        if gather is None or indices is None or int_attribute(gather, "axis", (0,)) != (1,) or not indices.size:
            return None
        num_channels = int(indices.max()) + 1
        num_repetitions = indices.size // num_channels
        is_repeated = np.array_equal(indices, np.repeat(np.arange(num_channels), num_repetitions))
        return cls(num_channels, num_repetitions) if is_repeated and num_repetitions > 1 else None


def repeat_channels(graph: ir.Graph) -> None:
    """Repeat the channels in front of each depthwise convolution that has several outputs for each, in place."""
    repeated: dict[tuple[ir.Node, int], ir.Value] = {}  # several convolutions may read the same integers
    for convolution in nodes(graph, "Conv"):
        data, weight = (producer(value, "DequantizeLinear") for value in convolution.inputs[:2])
        integers = None if weight is None else constant(weight.inputs[0])
        (num_channels,) = int_attribute(convolution, "group", (1,))
        if data is None or integers is None or integers.ndim not in _AXES or integers.shape[1] != 1:
            continue
        num_outputs = len(integers)
        if 1 < num_channels < num_outputs:
            if (data, num_outputs) not in repeated:
                repeated[data, num_outputs] = _repeated(convolution, data, num_channels, num_outputs)
            convolution.replace_input_with(0, repeated[data, num_outputs])
            convolution.attributes["group"] = ir.AttrInt64("group", num_outputs)


def _repeated(convolution: ir.Node, data: ir.Node, num_channels: int, num_outputs: int) -> ir.Value:
    """Return the input of a convolution with as many channels as it has outputs."""
    assert convolution.graph is not None
    indices = np.repeat(np.arange(num_channels), num_outputs // num_channels)
    operand = add_initializer(convolution.graph, f"channels.{num_channels}.to.{num_outputs}", indices)
    integers = source(data)
    copies = insert_node(convolution, "Gather", [integers, operand], axis=1).outputs[0]
    copies.name = f"{integers.name}.{num_outputs}_channels"
    return insert_node(convolution, "DequantizeLinear", [copies, *data.inputs[1:]]).outputs[0]
