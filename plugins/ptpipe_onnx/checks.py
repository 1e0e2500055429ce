"""What export.onnx needs of a machine."""

from __future__ import annotations

from collections.abc import Iterator

import onnxruntime as ort
from onnx import TensorProto, helper


def missing(opset: int) -> Iterator[str]:
    """A line that says so where ONNX Runtime can't run files of that opset."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  # its exceptions have no common base of their own
        yield f"onnxruntime {ort.__version__} does not run opset {opset}: choose a lower `opset`"
