"""Checks of `ptpipe doctor`: whether ONNX files can be written and run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions

from ptpipe import Check, CheckState, installed
from ptpipe_onnx import integer_products

_OPSET, _IR_VERSION = 18, 10


def run_checks() -> Iterator[Check]:
    """Check onnx, onnxscript and ONNX Runtime, and run a small file."""
    versions = [installed("onnx"), installed("onnxscript"), installed(_runtime(), bounds_of="onnxruntime")]
    yield from versions
    if all(version.state is CheckState.OK for version in versions):
        yield _run_session()


def _runtime() -> str:
    """Return the name of the installed distribution of ONNX Runtime: the CUDA build has another one."""
    names = {distribution.name for distribution in distributions()}
    return "onnxruntime-gpu" if "onnxruntime-gpu" in names and "onnxruntime" not in names else "onnxruntime"


def _run_session() -> Check:
    """Check that a session computes correct numbers."""
    remedy = "reinstall them: pip install --force-reinstall onnx onnxruntime"
    try:
        from ptpipe_torch.ort import ort

        sums, has_right_products = _session_sums(), integer_products.are_right()
        providers = ", ".join(name.removesuffix("ExecutionProvider") for name in ort.get_available_providers())
    except Exception as error:  # noqa: BLE001  # ONNX Runtime's exceptions have no common base class
        return Check.fail("onnx session", str(error).strip().partition("\n")[0], remedy)
    if sums != [11.0, 22.0]:
        return Check.fail("onnx session", f"1 + 10 and 2 + 20 returned {sums}", remedy)
    if not has_right_products:
        upgrade = f"pip install '{_runtime()}>={integer_products.FIXED_IN}'"
        return Check.fail("onnx session", integer_products.problem(ort.__version__), upgrade)
    return Check.ok("onnx session", f"runs opset {_OPSET}; providers: {providers}")


def _session_sums() -> list[float]:
    import numpy as np
    from onnx import TensorProto, checker, helper

    from ptpipe_torch.model.onnx_file import session_options
    from ptpipe_torch.ort import ort

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("a", "b", "sums")]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["sums"])], "probe", ends[:2], ends[2:])
    opsets = [helper.make_opsetid("", _OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    checker.check_model(model)
    content, options = model.SerializeToString(), session_options(num_threads=1)
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    feeds = {"a": np.array([1, 2], np.float32), "b": np.array([10, 20], np.float32)}
    sums: list[float] = session.run(None, feeds)[0].tolist()
    return sums
