"""Preflight check of export.onnx: which opsets and IR versions the installed ONNX Runtime supports."""

from __future__ import annotations

from onnx import TensorProto, helper

from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort


def unsupported_opset(opset: int, ir_version: int = 10) -> str | None:
    """Return an error message if ONNX Runtime can't run files of this opset and IR version, else None."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    try:
        ort.InferenceSession(model.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  # its exceptions have no common base class
        return (
            f"onnxruntime {ort.__version__} does not run opset {opset} in IR version {ir_version}: choose a lower "
            "`opset` or `ir_version`"
        )
    return None
