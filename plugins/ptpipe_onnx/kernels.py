"""What ONNX Runtime makes of a file: how many of its operators compute in integers, and how many in float."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnxruntime as ort

_INTEGER_PRODUCTS = ("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")
_EITHER = ("MaxPool", "NhwcMaxPool", "Clip")
"""Compute on whatever they get."""
_MOVES = {
    *("Concat", "Constant", "Expand", "Flatten", "Gather", "Identity", "ReorderInput", "ReorderOutput", "Reshape"),
    *("Shape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
}
_CONVERTS = {"Cast", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"}


@dataclass
class Kernels:
    """Operators of a file as ONNX Runtime runs it here, after its fusions, by type."""

    integer: Counter[str] = field(default_factory=Counter)
    float: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, path: Path, scratch: Path) -> Kernels:
        """Let ONNX Runtime optimize the file and count what comes out. Conversions and mere moves don't count."""
        optimized = scratch / "optimized.onnx"
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(optimized)
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(optimized, load_external_data=False).graph
        optimized.unlink()
        return cls._count(graph)

    @classmethod
    def _count(cls, graph: onnx.GraphProto) -> Kernels:
        counts = cls()
        holds_integers: set[str] = set()
        for node in graph.node:
            of_integers = bool(node.input) and node.input[0] in holds_integers
            is_quantized = node.op_type.startswith("QLinear") or node.op_type == "QGemm"
            if is_quantized or node.op_type in _INTEGER_PRODUCTS or (node.op_type in _EITHER and of_integers):
                counts.integer[node.op_type] += 1
            elif node.op_type not in _MOVES | _CONVERTS:
                counts.float[node.op_type] += 1
            hands_on = of_integers and (node.op_type in _EITHER or node.op_type in _MOVES)
            if is_quantized or hands_on or node.op_type == "QuantizeLinear":
                holds_integers.update(node.output)
        return counts
