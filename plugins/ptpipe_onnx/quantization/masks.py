"""Find the nodes that apply attention masks, which 8 bits can't hold.

A mask is added to the scores of attention before their softmax: 0, or a number so low that its weight vanishes, such as
-65504 or the least of float32. Scores of actions that are not allowed are masked likewise, in front of an ArgMax. ONNX
Runtime's quantizer observes the sums like any tensor, and spreads 256 levels over a range of which the scores
themselves are less than one.
"""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, TensorProto, numpy_helper

_LOWEST_SCORE = -9999.0
"""Masks begin at -10,000."""
_PASSES_ON = {
    "Add",
    "Sub",
    "Mul",
    "Where",
    "Cast",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Transpose",
    "Identity",
}
_PASSES_ON |= {"Concat", "Slice", "Gather", "Tile", "Split"}
_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}


def mask_nodes(graph: GraphProto) -> list[str]:
    """Return the names of the nodes from a mask's constant to the softmax, or whatever else reads masked scores."""
    masked = {tensor.name for tensor in graph.initializer if _is_mask(tensor)}
    scores: set[str] = set()
    names = []
    for node in graph.node:  # in topological order
        if any(_is_mask(own.t) for own in node.attribute if own.HasField("t")):
            masked.update(node.output)  # of Constant or ConstantOfShape
        if not masked.intersection(node.input):
            continue
        if node.op_type in _PASSES_ON:
            masked.update(node.output)
            scores.update(node.output)
            names.append(node.name)
        # A mask alone may be a bias, or the limit of a Clip; what a layer multiplies is no score.
        elif node.op_type not in _LAYERS and scores.intersection(node.input):
            names.append(node.name)
    return names


def _is_mask(tensor: TensorProto) -> bool:
    if tensor.data_type != TensorProto.FLOAT:
        return False
    values = numpy_helper.to_array(tensor)
    return bool(values.size) and float(np.min(values)) <= _LOWEST_SCORE
