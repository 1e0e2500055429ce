"""Files that ONNX Runtime's optimizations would turn into another function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ptpipe_onnx.runtime_passes import prevent_fusions, separate_zero_points

from .test_qdq_passes import IMAGES_NCHW, WEIGHT, Draft

Run = Callable[..., np.ndarray]


def check_same(model: onnx.ModelProto, run_onnx: Run, *, atol: float) -> None:
    """The file as it is, and with the passes and all optimizations."""
    guarded = ir.serde.deserialize_model(model)
    prevent_fusions(guarded.graph)
    content = ir.serde.serialize_model(guarded)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    assert np.ptp(expected) > 100 * atol
    found = run_onnx(content.SerializeToString(), IMAGES_NCHW, optimize=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_float_weights_are_not_quantized(op_type: str, is_computed: bool, run_onnx: Run) -> None:
    """Channels of so different size would be lost on one scale. Those that the file computes are constants, too."""
    draft = Draft()
    sizes = np.array([1, 1e-4, 1e-2, 1e-4]).reshape([-1, 1, 1, 1] if op_type == "Conv" else [1, -1, 1, 1])
    weight = draft.array(WEIGHT * sizes, np.float32)
    weight = draft.node("Neg", [weight]) if is_computed else weight
    value = draft.quantize("images", 0.05, 128)
    value = draft.node(op_type, [value, weight], pads=[1, 1, 1, 1])
    scaled = draft.node("Mul", [draft.quantize(value, 1e-3, 100), draft.array(1e3, np.float32)])
    check_same(draft.finished(scaled), run_onnx, atol=1.01)


@pytest.mark.parametrize("padding_value", [None, 0.0, 1.0])
def test_zeros_around_max_pooling_stay(padding_value: float | None, run_onnx: Run) -> None:
    draft = Draft()
    negative = draft.node("Sub", ["images", draft.array(20, np.float32)])
    inputs = [negative, draft.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)]
    inputs += [] if padding_value is None else [draft.array(padding_value, np.float32)]
    padded = draft.node("Pad", inputs)
    check_same(draft.finished(draft.node("MaxPool", [padded], kernel_shape=[2, 2], strides=[2, 2])), run_onnx, atol=0)


def test_a_weight_has_its_own_zero_point(run_onnx: Run) -> None:
    """Where two share one, ONNX Runtime refuses the option that `run_onnx` sets, without VNNI."""
    draft = Draft()
    scale, zero_point = draft.array(0.01, np.float32), draft.array(0, np.int8)
    value = draft.quantize("images", 0.05, 128)
    for _ in range(2):
        integers = draft.array(np.eye(IMAGES_NCHW.shape[-1]) * 100, np.int8)
        weight = draft.node("DequantizeLinear", [integers, scale, zero_point])
        value = draft.quantize(draft.node("MatMul", [value, weight]), 0.05, 128)
    model = draft.finished(value)
    separate = ir.serde.deserialize_model(model)
    separate_zero_points(separate.graph)
    content = ir.serde.serialize_model(separate)
    zero_points = [node.input[2] for node in content.graph.node if node.op_type == "DequantizeLinear"]
    of_weights = {array.name for array in content.graph.initializer if array.data_type == onnx.TensorProto.INT8}
    assert len([name for name in zero_points if name in of_weights]) == 2 == len(set(zero_points) & of_weights)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    np.testing.assert_allclose(
        run_onnx(content.SerializeToString(), IMAGES_NCHW, optimize=True), expected, rtol=0, atol=1e-6
    )
