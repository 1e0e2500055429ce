"""Graphs that ONNX Runtime computes by quicker kernels after the passes, to the same values.

Shape legend: N samples, C channels, H height, W width; O and I output and input channels of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ptpipe_onnx.latency_passes import use_quicker_kernels
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort

from .test_qdq_passes import IMAGES_NCHW, WEIGHT, Draft, conv, types_of

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
    options = session_options(num_threads=1)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return set(types_of(onnx.load(folder / "optimized.onnx")))


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


def stem(
    num_channels: int,
    kernel: tuple[int, int],
    *,
    group: int = 1,
    zero_point: int = 90,
    before: str = "",
    num_branches: int = 1,
) -> onnx.ModelProto:
    """Convolutions of the images, or of what an operator `before` makes of the integers of images, and their sum."""
    draft = Draft()
    value = draft.quantize("images", 0.05, zero_point)
    if before:
        value = draft.quantize(draft.node(before, [value]), 0.05, zero_point)
    pads = [1 if size > 1 else 0 for size in kernel] * 2
    branches = []
    for _ in range(num_branches):
        weight_OIHW = RNG.integers(-127, 128, (6, num_channels // group, *kernel))
        weight = draft.weight(weight_OIHW, RNG.uniform(0.005, 0.02, 6))
        branch = draft.node("Conv", [value, weight], pads=pads, strides=[2, 1], group=group)
        branches.append(draft.quantize(branch, 0.1, 128))
    return draft.finished(draft.node("Sum", branches) if branches[1:] else branches[0], ("N", num_channels, 6, 6))


@pytest.mark.parametrize("num_channels", [1, 2, 3, 5, 6, 7, 9])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (1, 7), (3, 1)])
def test_channels_of_weight_zero_change_nothing(num_channels: int, kernel: tuple[int, int], run_onnx: Run) -> None:
    model = stem(num_channels, kernel)
    after = passed(model)
    (pad,) = (node for node in after.graph.node if node.op_type == "Pad")
    assert pad.output[0] == f"{pad.input[0]}.padded"
    shapes = [array.dims for array in after.graph.initializer if len(array.dims) == 4]
    assert [shape[1] for shape in shapes] == [-(-num_channels // 4) * 4]
    images_NCHW = (RNG.normal(size=(3, num_channels, 6, 6)) * 4).astype(np.float32)
    expected = run_onnx(model.SerializeToString(), images_NCHW)
    assert np.ptp(expected) > 5
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), images_NCHW), expected)
    optimized = run_onnx(after.SerializeToString(), images_NCHW, optimize=True)
    np.testing.assert_allclose(optimized, expected, rtol=0, atol=0.101)


def test_several_convolutions_of_the_same_integers(run_onnx: Run) -> None:
    model = stem(3, (3, 3), num_branches=2)
    after = passed(model)
    assert types_of(after)["Pad"] == 1
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW[:, :3])
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW[:, :3]), expected)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(stem(4, (3, 3)), id="four channels"),
        pytest.param(stem(3, (4, 4)), id="large kernel"),
        pytest.param(stem(6, (3, 3), group=2), id="groups"),
        pytest.param(stem(3, (3, 3), before="Sigmoid"), id="computed by an integer kernel"),
    ],
)
def test_other_convolutions_are_left_alone(model: onnx.ModelProto) -> None:
    assert types_of(passed(model))["Pad"] == 0


@pytest.mark.parametrize("share_dequantized", [False, True])
def test_a_weight_that_another_layer_reads_keeps_its_channels(share_dequantized: bool) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 128)
    integers, scale = draft.array(WEIGHT[:3, :3], np.int8), draft.array(0.01, np.float32)
    zero_point = draft.array(0, np.int8)
    weight = draft.node("DequantizeLinear", [integers, scale, zero_point])
    for number in range(2):
        if number and not share_dequantized:
            weight = draft.node("DequantizeLinear", [integers, scale, zero_point])
        value = draft.quantize(draft.node("Conv", [value, weight]), 0.1, 128)
    after = passed(draft.finished(value, ("N", 3, 6, 6)))
    assert types_of(after)["Pad"] == 0
    (kept,) = (numpy_helper.to_array(array) for array in after.graph.initializer if len(array.dims) == 4)
    np.testing.assert_array_equal(kept, WEIGHT[:3, :3])
