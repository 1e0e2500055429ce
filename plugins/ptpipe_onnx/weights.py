"""Weights that torch has quantized, and how an exported graph comes to hold them as int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_onnx.graph import (
    Graph,
    Node,
    Value,
    add_constant,
    add_node,
    consumers,
    first_consumer,
    integers,
    remove_unused,
    replace,
)

_FLOAT = 1
"""onnx.TensorProto.FLOAT"""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as torch's int8 operators hold it: value = (integer - zero point) * scale."""

    integers: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    """Of shape () for the whole tensor, or one for each index of `axis`."""
    zero_points: npt.NDArray[np.int8]
    """Of the shape of `scales`."""
    axis: int = 0

    @property
    def per_channel(self) -> bool:
        """Whether each channel has a scale of its own."""
        return self.scales.ndim == 1

    def dequantized(self) -> npt.NDArray[np.float32]:
        """The floats that it stands for."""
        shape = [-1 if self.per_channel and axis == self.axis else 1 for axis in range(self.integers.ndim)]
        scales, zero_points = self.scales.reshape(shape), self.zero_points.reshape(shape).astype(np.float32)
        return (self.integers - zero_points) * scales

    def transposed(self) -> QuantizedWeight:
        """The transpose of a matrix."""
        return QuantizedWeight(self.integers.T, self.scales, self.zero_points, 1 - self.axis)


def store_weights(graph: Graph, weights: Mapping[str, QuantizedWeight]) -> None:
    """Replace each named float weight by int8 and a DequantizeLinear.

    Raises StageError for a weight that the exporter has not kept under its name.
    """
    for name, weight in weights.items():
        value = taken_weight(graph, name)
        for reader in consumers(value):
            if reader.op_type == "Transpose" and integers(reader, "perm", (1, 0)) == (1, 0):
                replace(reader.outputs[0], _dequantized(graph, reader, f"{name}.transposed", weight.transposed()))
                graph.remove(reader, safe=True)
        if consumers(value):
            replace(value, _dequantized(graph, first_consumer(value), name, weight))
    remove_unused(graph)


def store_convolutions(graph: Graph, weights: Mapping[str, QuantizedWeight]) -> None:
    """Let float convolutions keep their int8 weights as int8 in the file, with the batch norms folded in.

    Not by DequantizeLinear, which ONNX Runtime would leave standing in front of a float convolution and do at every
    run (1.8 times the latency of small_cnn): Cast and Mul of constants it folds when it loads the file. A folded
    batch norm scales each channel, so the integers are found again as what each channel is a multiple of.
    """
    waiting = dict(weights)
    for node in [node for node in graph if node.op_type == "Conv" and node.inputs[1].const_value is not None]:
        floats = node.inputs[1].const_value.numpy()
        for name, weight in waiting.items():
            scales = _scales(floats, weight)
            if scales is not None:
                parts = (
                    add_constant(graph, f"{name}.int8", weight.integers),
                    add_constant(graph, f"{name}.scale", scales),
                )
                as_float = add_node(node, "Cast", [parts[0]], to=_FLOAT).outputs[0]
                node.replace_input_with(1, add_node(node, "Mul", [as_float, parts[1]]).outputs[0])
                del waiting[name]
                break
    remove_unused(graph)


def _scales(floats: npt.NDArray[np.float32], weight: QuantizedWeight) -> npt.NDArray[np.float32] | None:
    """What each output channel's integers are multiplied by to give these floats; None where they don't."""
    if floats.shape != weight.integers.shape or weight.zero_points.any():
        return None
    integers_OX = weight.integers.reshape(len(floats), -1).astype(np.float64)
    floats_OX = floats.reshape(len(floats), -1)
    squares_O = (integers_OX**2).sum(axis=1)
    scales_O = (integers_OX * floats_OX).sum(axis=1) / np.where(squares_O > 0, squares_O, 1)
    if not np.allclose(integers_OX * scales_O[:, np.newaxis], floats_OX, rtol=1e-5, atol=1e-7):
        return None
    scales: npt.NDArray[np.float32] = scales_O.astype(np.float32).reshape(-1, *[1] * (floats.ndim - 1))
    return scales


def taken_weight(graph: Graph, name: str) -> Value:
    """The value of a weight that is about to be replaced, its name freed for what comes in its place."""
    value = graph.initializers.pop(name, None)
    if value is None:
        raise StageError(f"the exported graph has no weight {name}: leave its layer float")
    value.name = f"{name}.float"
    graph.initializers[value.name] = value
    return value


def _dequantized(graph: Graph, before: Node, name: str, weight: QuantizedWeight) -> Value:
    parts = (
        add_constant(graph, name, weight.integers),
        add_constant(graph, f"{name}.scale", weight.scales),
        add_constant(graph, f"{name}.zero_point", weight.zero_points),
    )
    output: Value = add_node(before, "DequantizeLinear", parts, axis=weight.axis).outputs[0]
    return output
