"""Rewrite an int8 ONNX file into the float network that it stands for: quantizing only saturates.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

MOVES = (
    *("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Split", "Slice", "Gather", "Expand"),
    "DepthToSpace",
)
"""Operators whose result is on the grid of their first input, besides `MaxPool`."""


ARRANGING = ("Pad", "Reshape", "Slice", "Transpose")
"""Operators that put a weight into another order."""


class Unrounding:
    """One pass over the nodes, in their order."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self._arranged = set[str]()  # what is computed from constants alone: weights in another order
        self._grids: dict[str, tuple[float, int]] = {}  # of tensors that are integers in the file
        self.still_rounds = False
        """Whether a clip of integers has a bound that lay between two of them, or an LSTM rounds its own inputs."""
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, np.ndarray] = {}

    def rewrite(self) -> None:
        for node in self._graph.node:
            rewrite = getattr(self, f"_rewrite_{node.op_type.lower()}", self._other)
            if node.op_type in ARRANGING and all(map(self._is_constant, node.input)):
                self._arranged.update(node.output)
                self.nodes.append(node)
            else:
                rewrite(node)
        kept = [*self._graph.initializer, *(numpy_helper.from_array(v, k) for k, v in self.initializers.items())]
        del self._graph.initializer[:], self._graph.node[:], self._graph.value_info[:]
        self._graph.initializer.extend(kept)
        self._graph.node.extend(self.nodes)

    def _is_constant(self, name: str) -> bool:
        return name in self._constants or name in self._arranged

    def _add(self, op_type: str, inputs: list[str], node: onnx.NodeProto, output: int = 0) -> None:
        self.nodes.append(helper.make_node(op_type, inputs, [node.output[output]], name=f"{node.name}/{output}"))

    def _constant(self, node: onnx.NodeProto, stem: str, value: object) -> str:
        name = f"{node.output[0]}/{stem}"
        self.initializers[name] = np.asarray(value, np.float32)
        return name

    def _bounds(self, node: onnx.NodeProto, grid: tuple[float, int], low: int = 0, high: int = 255) -> list[str]:
        scale, zero_point = grid
        values = [(low - zero_point) * scale, (high - zero_point) * scale]
        return [self._constant(node, stem, value) for stem, value in zip(("low", "high"), values, strict=True)]

    def _rewrite_quantizelinear(self, node: onnx.NodeProto) -> None:
        scale, zero_point = (self._constants[name] for name in node.input[1:3])
        assert zero_point.dtype == np.uint8 and scale.size == 1, node
        grid = self._grids[node.output[0]] = (float(scale), int(zero_point))
        self._add("Clip", [node.input[0], *self._bounds(node, grid)], node)

    def _rewrite_dequantizelinear(self, node: onnx.NodeProto) -> None:
        if self._is_constant(node.input[0]):
            self.nodes.append(node)
        else:
            scale, zero_point = (self._constants[name] for name in node.input[1:3])
            found, expected = (float(scale), int(zero_point)), self._grids[node.input[0]]
            assert found == expected, f"{node.name} reads integers of {expected} as {found}"
            self._add("Identity", [node.input[0]], node)

    def _rewrite_clip(self, node: onnx.NodeProto) -> None:
        grid = self._grids.get(node.input[0])
        if grid is None:
            self.nodes.append(node)
            return
        self._grids[node.output[0]] = grid
        low, high = (int(self._constants[name]) for name in node.input[1:3])
        self.still_rounds |= not {low, high} <= {0, grid[1], 255}
        self._add("Clip", [node.input[0], *self._bounds(node, grid, low, high)], node)

    def _rewrite_concat(self, node: onnx.NodeProto) -> None:
        grids = {self._grids.get(name) for name in node.input}
        assert len(grids) == 1, f"{node.name} concatenates integers of different grids: {grids}"
        self._carry(node, grids.pop())

    def _rewrite_pad(self, node: onnx.NodeProto) -> None:
        grid = self._grids.get(node.input[0])
        if grid is None:
            self._other(node)
            return
        self._grids[node.output[0]] = grid
        scale, zero_point = grid
        value = self._constant(node, "value", (int(self._constants[node.input[2]]) - zero_point) * scale)
        self._add("Pad", [*node.input[:2], value], node)

    def _rewrite_dynamicquantizelstm(self, node: onnx.NodeProto) -> None:
        self.still_rounds = True
        self._other(node)

    def _other(self, node: onnx.NodeProto) -> None:
        grid = self._grids.get(node.input[0]) if node.input else None
        assert grid is None or node.op_type in (*MOVES, "MaxPool"), f"{node.op_type} on integers"
        self._carry(node, grid)

    def _carry(self, node: onnx.NodeProto, grid: tuple[float, int] | None) -> None:
        self.nodes.append(node)
        if grid is not None:
            self._grids.update(dict.fromkeys(node.output[:1] if node.op_type == "MaxPool" else node.output, grid))

    def _rewrite_dynamicquantizelinear(self, node: onnx.NodeProto) -> None:
        self._add("Identity", [node.input[0]], node)
        self._add("Identity", [self._constant(node, "one", 1)], node, 1)
        self._add("Identity", [self._constant(node, "zero", 0)], node, 2)

    def _rewrite_matmulinteger(self, node: onnx.NodeProto) -> None:
        weight = self._constants[node.input[1]].astype(np.float32)
        if len(node.input) > 3 and node.input[3]:
            weight = weight - self._constants[node.input[3]].astype(np.float32)
        self._add("MatMul", [node.input[0], self._constant(node, "weight", weight)], node)


def unrounded_logits(path: Path, images_NCHW: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return what the file would compute if it rounded no activation, and whether it still rounds some."""
    model = onnx.load(str(path))
    unrounding = Unrounding(model)
    unrounding.rewrite()
    assert all(value.type.tensor_type.elem_type == TensorProto.FLOAT for value in model.graph.output)
    return run_file(model.SerializeToString(), images_NCHW), unrounding.still_rounds


def run_file(content: bytes | str, images_NCHW: np.ndarray) -> np.ndarray:
    """Run a file, or its content, without ONNX Runtime's own optimizations."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    logits_NK: np.ndarray = session.run(None, {session.get_inputs()[0].name: images_NCHW})[0]
    return logits_NK
