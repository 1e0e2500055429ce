"""Count the integer and float kernels that ONNX Runtime selects for a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort

_INTEGER_PRODUCTS = (
    *("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"),
    "DynamicQuantizeLSTM",
)
_EITHER = ("MaxPool", "NhwcMaxPool", "Clip")
"""Compute on integers or floats, depending on their input."""
_MOVES = {
    *("Concat", "Constant", "Expand", "Flatten", "Gather", "Identity", "Pad", "ReorderInput", "ReorderOutput"),
    *("Reshape", "Scan", "Shape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
}
_RENAMED = re.compile(r"(_token_\d+|_nchwc)+$")
"""What ONNX Runtime appends to the name of a node that it replaces."""
_CONVERTS = {"Cast", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"}


@dataclass
class Kernels:
    """Number of operators by type, in the graph that ONNX Runtime runs on this machine, after its fusions."""

    integer: Counter[str] = field(default_factory=Counter)
    float: Counter[str] = field(default_factory=Counter)
    integer_nodes: set[str] = field(default_factory=set)
    """Names of the integer operators: of those in the file that they compute."""
    integer_operands: set[str] = field(default_factory=set)
    """Names of all that they read."""

    @classmethod
    def of(cls, path: Path, scratch: Path) -> Kernels:
        """Let ONNX Runtime optimize the file and count its operators, without conversions and data movement.

        `scratch`: folder for the optimized file, which is removed.
        """
        optimized = scratch / "optimized.onnx"
        options = session_options(num_threads=1)
        options.optimized_model_filepath = str(optimized)
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(optimized, load_external_data=False).graph
        optimized.unlink()
        return cls._count(graph)

    @classmethod
    def _count(cls, graph: onnx.GraphProto) -> Kernels:
        counts = cls()
        integer_values: set[str] = set()
        for node in _all_nodes(graph):
            on_integers = bool(node.input) and node.input[0] in integer_values
            is_quantized = node.op_type.startswith("QLinear") or node.op_type == "QGemm"
            if is_quantized or node.op_type in _INTEGER_PRODUCTS or (node.op_type in _EITHER and on_integers):
                counts.integer[node.op_type] += 1
                counts.integer_nodes.add(_RENAMED.sub("", node.name))
                counts.integer_operands.update(node.input)
            elif not _moves(node) and node.op_type not in _CONVERTS:
                counts.float[node.op_type] += 1
            passes_on = on_integers and (node.op_type in _EITHER or _moves(node))
            if is_quantized or passes_on or node.op_type == "QuantizeLinear":
                integer_values.update(node.output)
        return counts


def _moves(node: onnx.NodeProto) -> bool:
    """Return whether an operator only moves or copies values, as a maximum of one tensor does."""
    return node.op_type in _MOVES or (node.op_type == "Max" and len(node.input) == 1)


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of those inside its nodes: the steps of a Scan."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g)
