"""Sessions whose sums are exact on every processor. Shape legend: N samples, K inputs and outputs of each layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ptpipe import host
from ptpipe_torch import OnnxFile, Signature, TensorSpec
from ptpipe_torch.model import exact_session as module
from ptpipe_torch.model.exact_session import exact_session, may_saturate, with_separate_weights
from ptpipe_torch.model.onnx_file import session_options

K, NUM_LAYERS = 16, 3
X_SCALE, W_SCALE, Y_SCALE = np.float32(1 / 255), np.float32(0.0006), np.float32(0.005)
WEIGHT_KK = np.random.default_rng(0).integers(90, 128, (K, K)).astype(np.int8)
X_NK = np.random.default_rng(1).uniform(0.5, 1, (5, K)).astype(np.float32)


def layers(*, shared: bool) -> ModelProto:
    """Give layers of equal weights, whose pairs of products exceed 16 bits; `shared`: all read one DequantizeLinear."""
    arrays = {"x_scale": X_SCALE, "x_zero": np.uint8(0), "y_scale": Y_SCALE, "y_zero": np.uint8(0), "w_scale": W_SCALE}
    nodes: list[NodeProto] = []

    def add(op_type: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    value = add("QuantizeLinear", ["x", "x_scale", "x_zero"], "x_int")
    value = add("DequantizeLinear", [value, "x_scale", "x_zero"], "x_float")
    for number in range(NUM_LAYERS):
        own = "" if shared else str(number)
        if not (shared and number):
            arrays |= {f"w{own}": WEIGHT_KK, f"zero{own}": np.int8(0)}
            add("DequantizeLinear", [f"w{own}", "w_scale", f"zero{own}"], f"w_float{own}")
        value = add("Gemm", [value, f"w_float{own}"], f"sum{number}", transB=1)
        value = add("QuantizeLinear", [value, "y_scale", "y_zero"], f"int{number}")
        value = add("DequantizeLinear", [value, "y_scale", "y_zero"], f"y{number}")
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", K]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def expected() -> np.ndarray:
    integers_NK, step = np.rint(X_NK / X_SCALE), X_SCALE
    for _ in range(NUM_LAYERS):
        sums_NK = integers_NK @ WEIGHT_KK.T.astype(np.float64)
        integers_NK, step = np.clip(np.rint(sums_NK * (step * W_SCALE / Y_SCALE)), 0, 255), Y_SCALE
    return integers_NK * Y_SCALE


@pytest.mark.parametrize("shared", [False, True])
def test_sums_are_exact_where_usual_kernels_saturate(shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(layers(shared=shared), path)
    signature = Signature((TensorSpec("x", "float32", ("batch", K)),), (TensorSpec("y2", "float32", ("batch", K)),))
    file = OnnxFile(path, signature, "int8")
    with file.with_exact_sums().predictor(1) as predict, file.predictor(1) as predict_as_usual:
        exact, usual = (predicted({"x": X_NK})["y2"] for predicted in (predict, predict_as_usual))
    np.testing.assert_allclose(exact, expected(), rtol=1e-6)
    assert np.array_equal(exact, usual) is not may_saturate()


@pytest.mark.parametrize("shared", [False, True])
def test_each_reader_gets_a_copy(shared: bool) -> None:
    model = with_separate_weights(layers(shared=shared))
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT8}
    read = [name for node in model.graph.node for name in node.input if name in stored]
    assert len(read) == len(set(read)) == 2 * NUM_LAYERS
    session = ort.InferenceSession(layers(shared=shared).SerializeToString(), providers=["CPUExecutionProvider"])
    copied = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(copied.run(None, {"x": X_NK})[0], session.run(None, {"x": X_NK})[0])


def test_a_file_is_read_as_it_is_where_nothing_saturates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "may_saturate", lambda: False)
    monkeypatch.setattr(module, "with_separate_weights", None)
    onnx.save(layers(shared=True), tmp_path / "model.onnx")
    assert exact_session(tmp_path / "model.onnx", session_options(1)).run(None, {"x": X_NK})[0].shape == X_NK.shape


@pytest.mark.parametrize(
    ("metadata", "may", "is_exact"),
    [
        ({"backend": "qnnpack", "saturating_layers_without_vnni": '["sum0"]'}, True, True),
        ({"backend": "qnnpack", "saturating_layers_without_vnni": '["sum0"]'}, False, False),
        ({"backend": "qnnpack", "saturating_layers_without_vnni": "[]"}, True, False),
        ({"backend": "fbgemm", "saturating_layers_without_vnni": '["sum0"]'}, True, False),
        ({}, True, False),
    ],
)
def test_a_file_for_phones_has_their_sums(
    metadata: dict[str, str], may: bool, is_exact: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "may_saturate", lambda: may)
    model, path = layers(shared=False), tmp_path / "model.onnx"
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    signature = Signature((TensorSpec("x", "float32", ("batch", K)),), (TensorSpec("y2", "float32", ("batch", K)),))
    file = OnnxFile(path, signature, "int8")
    assert (file.as_on_target() is not file) is is_exact
    if is_exact:
        with file.as_on_target().predictor(1) as predict:
            np.testing.assert_allclose(predict({"x": X_NK})["y2"], expected(), rtol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "flags", "may"),
    [
        ("x86_64", {"avx2"}, True),
        ("AMD64", None, True),
        ("x86_64", {"avx2", "avx_vnni"}, False),
        ("x86_64", {"avx512f", "avx512_vnni"}, False),
        ("aarch64", None, False),
    ],
)
def test_where_usual_kernels_may_saturate(
    architecture: str, flags: set[str] | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: architecture)
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    assert may_saturate() is may
