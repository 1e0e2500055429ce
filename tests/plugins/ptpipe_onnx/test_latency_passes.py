"""Graphs that ONNX Runtime computes by quicker kernels after the passes, to the same values.

Shape legend: N samples, C channels, H height, W width; O and I output and input channels of a weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ptpipe_onnx.latency_passes import merge_axes_behind_softmax, use_quicker_kernels
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort

from .conftest import Exported
from .test_qdq_passes import IMAGES_NCHW, Draft, conv, types_of

Run = Callable[..., np.ndarray]
RNG = np.random.default_rng(3)


def passed(model: onnx.ModelProto, apply: Callable[[ir.Graph], None] = use_quicker_kernels) -> onnx.ModelProto:
    """Apply the passes; the graph must stay valid."""
    read = ir.serde.deserialize_model(model)
    apply(read.graph)
    content = onnx.shape_inference.infer_shapes(ir.serde.serialize_model(read), strict_mode=True)
    onnx.checker.check_model(content, full_check=True)
    return content


def run_types(model: onnx.ModelProto, folder: Path) -> set[str]:
    """Types of the operators that ONNX Runtime runs."""
    return set(run_operators(model, folder))


def run_operators(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """How many operators of each type ONNX Runtime runs."""
    options = session_options(num_threads=1)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return types_of(onnx.load(folder / "optimized.onnx"))


def repeated(op_type: str, axes: list[int], *, is_first: bool) -> onnx.ModelProto:
    """Combine images with their first elements along some axes, which are repeated."""
    draft = Draft()
    images = draft.quantize("images", 0.05, 128)
    ends = [draft.array(value, np.int64) for value in ([0] * len(axes), [1] * len(axes), axes)]
    part = draft.node("Slice", [images, *ends]) if axes else images
    part = draft.quantize(part, 0.05, 128)
    operands = [part, images] if is_first else [images, part]
    model = draft.finished(draft.quantize(draft.node(op_type, operands), 0.5, 128))
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("op_type", ["Mul", "Add"])
@pytest.mark.parametrize(
    ("axes", "is_float"),
    [
        ([2], True),
        ([3], True),
        ([1, 3], True),
        ([2, 3], False),
        ([1], False),
        ([1, 2, 3], False),
        ([], False),
    ],
)
def test_short_runs_are_combined_in_float(
    axes: list[int], is_float: bool, op_type: str, is_first: bool, run_onnx: Run, tmp_path: Path
) -> None:
    model = repeated(op_type, axes, is_first=is_first)
    after = passed(model)
    assert f"QLinear{op_type}" in run_types(model, tmp_path)
    assert (f"QLinear{op_type}" not in run_types(after, tmp_path)) == is_float
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW), expected)


def averaged(draft: Draft, kernel: list[int], value: str, **options: Any) -> str:
    """Pool images, sequences or volumes made of `value`."""
    shape = {1: [0, 4, 36], 2: [0, 4, 6, 6], 3: [0, 1, 4, 6, 6]}[len(kernel)]
    reshaped = draft.node("Reshape", [value, draft.array(shape, np.int64)])
    return draft.node("AveragePool", [draft.quantize(reshaped, 0.05, 128)], kernel_shape=kernel, **options)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ([5], {}),
        ([2, 2], {"strides": [2, 2]}),
        ([3, 3], {"pads": [1, 1, 1, 1], "count_include_pad": 0}),
        ([3, 3], {"pads": [1, 1, 1, 1], "count_include_pad": 1}),
        ([4, 4], {"strides": [3, 3], "ceil_mode": 1, "count_include_pad": 1}),  # the integer kernel counts too many
        ([3, 1, 1], {}),
    ],
)
def test_averages_over_windows_are_computed_in_float(
    kernel: list[int], options: dict[str, Any], run_onnx: Run, tmp_path: Path
) -> None:
    draft = Draft()
    pooled = averaged(draft, kernel, draft.quantize("images", 0.05, 128), **options)
    model = draft.finished(draft.quantize(pooled, 0.05, 128))
    after = passed(model)
    assert "QLinearAveragePool" in run_types(model, tmp_path)
    assert "QLinearAveragePool" not in run_types(after, tmp_path)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW), expected)
    optimized = run_onnx(after.SerializeToString(), IMAGES_NCHW, optimize=True)
    np.testing.assert_allclose(optimized, expected, rtol=0, atol=0.0501)  # a tie
    assert (np.abs(optimized - expected) < 1e-6).mean() > 0.95


def summed(axes: list[int], keepdims: int = 0, *, is_rounded: bool = True) -> onnx.ModelProto:
    """Sum images of 4 channels and 6 x 6 pixels in two halves each way."""
    draft = Draft()
    shape = draft.array([0, 2, 2, 6, 2, 3], np.int64)
    halves = draft.node("Reshape", [draft.quantize("images", 0.05, 128), shape])
    total = draft.node("ReduceSum", [draft.quantize(halves, 0.05, 128), draft.array(axes, np.int64)], keepdims=keepdims)
    return draft.finished(draft.quantize(total, 0.13, 120) if is_rounded else draft.node("Relu", [total]))


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axis", [1, 2, 4, -2])
def test_two_halves_are_added_as_integers(axis: int, keepdims: int, run_onnx: Run, tmp_path: Path) -> None:
    model = onnx.shape_inference.infer_shapes(summed([axis], keepdims))
    after = passed(model)
    assert "ReduceSum" in run_types(model, tmp_path)
    assert "QLinearAdd" in run_types(after, tmp_path)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    assert np.ptp(expected) > 5
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW), expected)
    found = run_onnx(after.SerializeToString(), IMAGES_NCHW, optimize=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", [summed([3]), summed([1, 2]), summed([1], is_rounded=False)])
def test_other_sums_are_left_alone(model: onnx.ModelProto) -> None:
    assert types_of(passed(onnx.shape_inference.infer_shapes(model)))["ReduceSum"] == 1


def largest(op_type: str) -> onnx.ModelProto:
    """Max pooling of what an operator computes."""
    draft = Draft()
    images = draft.quantize("images", 0.05, 128)
    value = conv(draft, images) if op_type == "Conv" else draft.node(op_type, [images])
    pool = draft.node("MaxPool", [draft.quantize(value, 0.05, 100, dequantize=False)], kernel_shape=[2, 2])
    grid = [draft.array(0.05, np.float32), draft.array(100, np.uint8)]
    return draft.finished(draft.node("DequantizeLinear", [pool, *grid]))


@pytest.mark.parametrize(("op_type", "is_float"), [("Tanh", True), ("Sigmoid", False), ("Conv", False)])
def test_largest_values_of_float_operators_are_taken_before_rounding(
    op_type: str, is_float: bool, run_onnx: Run, tmp_path: Path
) -> None:
    model = largest(op_type)
    after = passed(model)
    (pool,) = (node for node in after.graph.node if node.op_type == "MaxPool")
    sources = {output: node.op_type for node in after.graph.node for output in node.output}
    assert (sources[pool.input[0]] == op_type) == is_float
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    for optimize in (False, True):
        found = run_onnx(after.SerializeToString(), IMAGES_NCHW, optimize=optimize)
        np.testing.assert_allclose(found, expected, atol=0 if not optimize else 0.0501)
    optimized = onnx.load(tmp_path / "optimized.onnx") if run_types(after, tmp_path) else None
    assert optimized is not None
    if is_float:  # the runtime doesn't move the rounding back
        (pool,) = (node for node in optimized.graph.node if node.op_type == "MaxPool")
        assert {own.name for own in optimized.graph.initializer if own.data_type == onnx.TensorProto.UINT8}
        names = {output: node.op_type for node in optimized.graph.node for output in node.output}
        assert names[pool.input[0]] == op_type


def softmax(output_scale: float = 1 / 256) -> onnx.ModelProto:
    draft = Draft()
    value = draft.node("Softmax", [draft.quantize("images", 0.05, 128)], axis=-1)
    return draft.finished(draft.quantize(value, output_scale, 0))


def test_softmax_is_computed_in_float(run_onnx: Run, tmp_path: Path) -> None:
    model = softmax()
    after = passed(model)
    assert "QLinearSoftmax" in run_types(model, tmp_path)
    assert "QLinearSoftmax" not in run_types(after, tmp_path)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    assert np.ptp(expected) > 0.5
    found = run_onnx(after.SerializeToString(), IMAGES_NCHW, optimize=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1.01 / 256)
    assert (np.abs(found - expected) > 0.01 / 256).mean() < 1e-3


def test_a_softmax_that_is_float_anyway_is_left_alone() -> None:
    draft = Draft()
    value = draft.node("Softmax", [draft.quantize("images", 0.05, 128)], axis=-1)
    assert types_of(passed(draft.finished(value)))["Max"] == 0


@pytest.mark.parametrize(
    ("op_type", "axis", "shape", "is_merged"),
    [
        ("Softmax", 1, ("N", 4, 6, 6), True),
        ("LogSoftmax", 1, ("N", 4, 6, 6), True),
        ("Softmax", -3, ("N", 4, "H", 6), True),
        ("Softmax", 1, ("N", 4, "H", "W"), False),
        ("Softmax", 2, ("N", 4, 6, 6), False),
        ("Softmax", -1, ("N", 4, 6, 6), False),
    ],
)
def test_a_softmax_of_channels_has_one_axis_behind_it(op_type, axis, shape, is_merged, run_onnx: Run) -> None:
    draft = Draft()
    model = draft.finished(draft.node(op_type, ["images"], axis=axis), shape)
    after = passed(model, merge_axes_behind_softmax)
    assert types_of(after)["Reshape"] == 2 * is_merged
    expected, found = (run_onnx(of.SerializeToString(), IMAGES_NCHW) for of in (model, after))
    assert np.array_equal(found, expected)


def pooled(*, is_clip_read_twice: bool = False) -> onnx.ModelProto:
    draft = Draft()
    value = conv(draft, draft.quantize("images", 0.05, 128), bias=np.zeros(4))
    grid = [draft.array(0.05, np.float32), draft.array(100, np.uint8)]
    integers = draft.node("QuantizeLinear", [value, *grid])
    clipped = draft.node("Clip", [integers, draft.array(140, np.uint8), draft.array(160, np.uint8)])
    value = draft.node("MaxPool", [clipped], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    values = [draft.node("DequantizeLinear", [value, *grid])]
    if is_clip_read_twice:
        values.append(draft.node("ReduceMean", [draft.node("DequantizeLinear", [clipped, *grid])], keepdims=1))
    return draft.finished(draft.node("Sum", values))


def test_pooling_goes_in_front_of_a_clip(run_onnx: Run, tmp_path: Path) -> None:
    model = pooled()
    after = passed(model)
    order = [node.op_type for node in after.graph.node if node.op_type in ("Clip", "MaxPool")]
    assert order == ["MaxPool", "Clip"]
    assert "NhwcMaxPool" not in run_types(model, tmp_path)
    assert "NhwcMaxPool" in run_types(after, tmp_path)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    assert np.ptp(expected) == pytest.approx(20 * 0.05)  # both bounds are met
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW), expected)


def test_a_clip_that_something_else_reads_stays_in_front() -> None:
    order = [node.op_type for node in passed(pooled(is_clip_read_twice=True)).graph.node]
    assert order.index("Clip") < order.index("MaxPool")


def prelu(slopes: list[float]) -> onnx.ModelProto:
    draft = Draft()
    slope = draft.array(np.reshape(slopes, (1, -1, 1, 1)), np.float32)
    value = draft.node("PRelu", [draft.quantize("images", 0.05, 128), slope])
    return draft.finished(draft.quantize(value, 0.04, 90))


@pytest.mark.parametrize("slopes", [[0.25], [-0.5], [0.25, 0.0, -0.7, 3.0]])
def test_prelu_is_written_as_what_has_a_quicker_kernel(slopes: list[float], run_onnx: Run, tmp_path: Path) -> None:
    model = prelu(slopes)
    after = passed(model)
    assert "PRelu" not in types_of(after)
    assert ("QLinearLeakyRelu" in run_types(after, tmp_path)) == (len(slopes) == 1)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    assert np.ptp(expected) > 5
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW), expected)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW, optimize=True), expected)


def rms_norm(*, is_inverse_read_twice: bool = False) -> onnx.ModelProto:
    draft = Draft()
    squares = draft.node("Pow", ["images", draft.array(2, np.float32)])
    mean = draft.node("ReduceMean", [squares, draft.array([-1], np.int64)], keepdims=1)
    root = draft.node("Sqrt", [draft.node("Add", [mean, draft.array(1e-6, np.float32)])])
    inverse = draft.node("Reciprocal", [root])
    normalized = draft.node("Mul", ["images", inverse])
    if is_inverse_read_twice:
        normalized = draft.node("Add", [normalized, inverse])
    scale = draft.array(RNG.uniform(0.5, 2, IMAGES_NCHW.shape[-1]), np.float32)
    return draft.finished(draft.node("Mul", [scale, normalized]))


def test_an_rms_norm_is_written_as_what_has_a_kernel(run_onnx: Run, tmp_path: Path) -> None:
    model = rms_norm()
    after = passed(model)
    assert "SimplifiedLayerNormalization" not in run_types(model, tmp_path)
    assert "SimplifiedLayerNormalization" in run_types(after, tmp_path)
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    for optimize in (False, True):
        found = run_onnx(after.SerializeToString(), IMAGES_NCHW, optimize=optimize)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_inverse_that_something_else_reads_is_left_alone() -> None:
    types = types_of(passed(rms_norm(is_inverse_read_twice=True)))
    assert (types["Reciprocal"], types["Div"]) == (1, 0)


@pytest.mark.parametrize("name", ["cnn", "depthwise", "rows", "attention"])
def test_an_exported_file_has_nothing_unused(name: str, exported: Callable[..., Exported]) -> None:
    """ONNX Runtime runs operators that nothing reads."""
    graph = onnx.load(exported(name, "fbgemm").file.path).graph
    read = {value for node in graph.node for value in node.input} | {output.name for output in graph.output}
    assert [node.name for node in graph.node if not read & set(node.output)] == []
    assert {array.name for array in graph.initializer} <= read
