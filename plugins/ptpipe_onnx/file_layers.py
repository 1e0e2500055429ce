"""The layers of a file: its convolutions, linear layers, matrix products and recurrent layers, with their names.

A layer has the name of its weight, without `.weight`; a matrix product of two activations that of its node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import Array, constant, producer, source
from ptpipe_onnx.linear_pass import SequenceLayer
from ptpipe_onnx.subpixel import evaluated

_PRODUCTS = {
    "Conv": "convolution",
    "ConvInteger": "convolution",
    "ConvTranspose": "transposed convolution",
    "Gemm": "linear layer",
    "LSTM": "recurrent layer",
    "GRU": "recurrent layer",
    "RNN": "recurrent layer",
}
_RECURRENT_PRODUCT = "recurrent product"
_MATRIX_PRODUCTS = ("MatMul", "MatMulInteger")
_PREPARES = ("DequantizeLinear", "Cast", "Mul", "Transpose", "Identity", "Pad", "Reshape", "Slice")
"""What may stand between a stored weight and its layer."""
_RECURRENT_WEIGHT = re.compile(r"\bweight_(ih|hh)_l\d+(_reverse)?$")
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
    place: int = 1
    """Index of the weight among the node's inputs."""

    @property
    def integers(self) -> Array | None:
        """The int8 weights that the operator reads through a DequantizeLinear or directly, else None."""
        operand = self.node.inputs[self.place]
        dequantize = producer(operand, "DequantizeLinear")
        if dequantize is None and operand is not self.weight:
            return None
        content = evaluated(operand if dequantize is None else source(dequantize))
        return content if content is not None and content.dtype == np.int8 else None


def layers_of(graph: ir.Graph) -> Iterator[FileLayer]:
    """Yield the layers of a graph, in topological order.

    Of a recurrent layer that is int8, its product with the input and that with the state are two.
    """
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.op_type == "DynamicQuantizeLSTM":
            for place in (1, 2):
                weight = stored_weight(node.inputs[place])
                yield FileLayer(_name(node, weight), _RECURRENT_PRODUCT, node, weight, place)
        elif node.op_type in (*_PRODUCTS, *_MATRIX_PRODUCTS) and node.domain in ("", "ai.onnx"):
            weight = stored_weight(node.inputs[1])
            yield FileLayer(_name(node, weight), _kind(node, weight), node, weight)
        elif node.op_type == "Einsum" and len(node.inputs) == 2:
            weights = [stored_weight(operand) for operand in node.inputs]
            place = int(weights[0] is None)
            kind = "matrix product" if weights[place] is None else "linear layer"
            yield FileLayer(_name(node, weights[place]), kind, node, weights[place], place)


def _kind(node: ir.Node, weight: ir.Value | None) -> str:
    if node.op_type == "Conv":
        return _PRODUCTS["Conv" if SequenceLayer.of(node) is None else "Gemm"]
    if node.op_type in _PRODUCTS:
        return _PRODUCTS[node.op_type]
    if weight is None:
        return "matrix product"
    is_recurrent = _RECURRENT_WEIGHT.search(str(weight.name)) is not None
    return _RECURRENT_PRODUCT if is_recurrent and node.op_type == "MatMulInteger" else "linear layer"


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
