"""Weights that torch has quantized, and how an exported graph comes to hold them as int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_onnx.graph import Graph, Node, Value, add_constant, add_node, consumers, integers, remove_unused, replace


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
        if readers := [reader for reader in consumers(value) if any(output.uses() for output in reader.outputs)]:
            first = next(node for node in graph if node in readers)
            replace(value, _dequantized(graph, first, name, weight))
    remove_unused(graph)


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
