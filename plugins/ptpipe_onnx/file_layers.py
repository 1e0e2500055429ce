"""The layers of a file: its convolutions, linear layers, matrix products and recurrent layers, with their names.

A layer has the name of its weight, without `.weight`; a matrix product of two activations that of its node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import Array, constant, nodes, producer

_PRODUCTS = {
    "Conv": "convolution",
    "ConvInteger": "convolution",
    "ConvTranspose": "transposed convolution",
    "Gemm": "linear layer",
    "LSTM": "recurrent layer",
    "GRU": "recurrent layer",
    "RNN": "recurrent layer",
}
_MATRIX_PRODUCTS = ("MatMul", "MatMulInteger")
_PREPARES = ("DequantizeLinear", "Cast", "Mul", "Transpose", "Identity")
"""What may stand between a stored weight and its layer."""
_SUFFIXES = (".int8", ".transposed", ".float")


@dataclass(frozen=True)
class FileLayer:
    """An operator that multiplies by weights, or two activations."""

    name: str
    kind: str
    """In words, in the singular: `convolution`."""
    node: ir.Node
    weight: ir.Value | None
    """As it is stored: an initializer, of integers or floats; None for a product of activations."""

    @property
    def integers(self) -> Array | None:
        """The int8 weights that the operator reads through a DequantizeLinear or directly, else None."""
        operand = self.node.inputs[1]
        is_quantized = producer(operand, "DequantizeLinear") is not None or operand is self.weight
        content = constant(self.weight) if is_quantized else None
        return content if content is not None and content.dtype == np.int8 else None


def layers_of(graph: ir.Graph) -> Iterator[FileLayer]:
    """Yield the layers of a graph, in topological order."""
    for node in nodes(graph, *_PRODUCTS, *_MATRIX_PRODUCTS):
        weight = stored_weight(node.inputs[1])
        kind = _PRODUCTS.get(node.op_type) or ("matrix product" if weight is None else "linear layer")
        yield FileLayer(_name(node, weight), kind, node, weight)


def stored_weight(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer that an operand is computed from alone; None if there is none."""
    while (node := producer(value, *_PREPARES)) is not None:
        value = node.inputs[0]
    return value if constant(value) is not None else None


def _name(node: ir.Node, weight: ir.Value | None) -> str:
    name = str(node.name if weight is None else weight.name)
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name.removesuffix(".weight") or str(node.name)
