"""What is counted in a graph, and the formulas. Imports neither torch nor numpy.

A multiply-accumulate is one product that is added to a sum: of convolutions, matrix products, recurrent layers and
attention. Biases, normalization, activations and pooling are not counted, as in the published figures of networks
(1.814e9 for a ResNet-18 on 224 x 224 pixels).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

Shape: TypeAlias = Sequence[int]
INT8 = "int8"


@dataclass
class GraphCounts:
    """Of one prediction."""

    macs: Counter[str] = field(default_factory=Counter)
    """Multiply-accumulates by the dtype that they are computed in."""
    operators: Counter[str] = field(default_factory=Counter)
    float_operators: list[str] = field(default_factory=list)
    """Operators that compute in floating point, `layer (operator)`, in order."""
    uncounted: list[str] = field(default_factory=list)
    """Operators with products whose number isn't known, in order."""
    weights_read_bytes: int = 0
    """Of the stored tensors that it reads, each once; of tables of embeddings the rows alone."""

    def per_sample(self, num_samples: int) -> GraphCounts:
        """Return the counts for one of so many samples that were predicted together."""
        macs = Counter({dtype: round(number / num_samples) for dtype, number in self.macs.items()})
        return GraphCounts(macs, self.operators, self.float_operators, self.uncounted, self.weights_read_bytes)


def convolution(out: Shape, weight: Shape) -> int:
    """Of a convolution with weights (C_out, C_in / groups, kernel...): each output sums over the rest of a filter."""
    return prod(out) * prod(weight[1:])


def transposed_convolution(input_: Shape, weight: Shape) -> int:
    """Of a transposed convolution with weights (C_in, C_out / groups, kernel...): each input enters a whole filter."""
    return prod(input_) * prod(weight[1:])


def matrix_product(out: Shape, inner: int) -> int:
    """Of any product of matrices, batched ones too. `inner`: the size that is summed over."""
    return prod(out) * inner


def attention(query: Shape, key: Shape, value: Shape) -> int:
    """Of softmax(Q K^T) V with Q (..., L, E), K (..., S, E) and V (..., S, E_v)."""
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def recurrent(num_steps: int, num_gates: int, sizes: Sequence[tuple[int, int]]) -> int:
    """Of recurrent layers. `num_steps`: of all sequences together. `sizes`: input and hidden size of each layer.

    A direction counts as a layer. A step of a gate multiplies the input and the hidden state by a matrix each.
    """
    return sum(num_steps * num_gates * hidden * (size + hidden) for size, hidden in sizes)
