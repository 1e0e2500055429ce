"""Find the nodes whose values grow with the size of the inputs: coordinates of pixels, and boxes made of them.

Their range in calibration is that of the data set's one size: a larger picture would have its boxes cut off there. A
file that takes one size has constants in their place.
"""

from __future__ import annotations

from onnx import GraphProto

_ARITHMETIC = ("Abs", "Add", "Div", "Exp", "Max", "Min", "Mul", "Neg", "Pow", "Sqrt", "Sub", "Sum")
_MOVES = (
    *("Cast", "Concat", "Expand", "Gather", "GatherElements", "Identity", "Reshape", "ScatterElements", "Slice"),
    *("Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
)
_ALL_VALUES = (*_ARITHMETIC, "Concat")
"""Operators all of whose inputs are values; of others, the first one is."""


def nodes_of_coordinates(graph: GraphProto) -> list[str]:
    """Return the names of the nodes that compute with numbers from 0 to a size, and of those that move the results."""
    growing = {name for node in graph.node if node.op_type == "Range" for name in node.output}
    found = []
    for node in graph.node:  # in topological order
        values = node.input if node.op_type in _ALL_VALUES else node.input[:1]
        if node.op_type in (*_ARITHMETIC, *_MOVES) and not growing.isdisjoint(values):
            growing.update(node.output)
            found.append(node.name)
    return found
