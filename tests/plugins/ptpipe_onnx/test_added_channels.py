"""Convolutions with channels of zeros: hand-made graphs, the values before and after.

Shape legend: N samples, C channels, H height, W width; O and I output and input channels of a weight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ptpipe_onnx.added_channels import drop_depthwise_padding, pad_depthwise
from ptpipe_onnx.graph import remove_unused

from .test_latency_passes import Run, passed
from .test_qdq_passes import IMAGES_NCHW, WEIGHT, Draft, kernels_of, types_of

RNG = np.random.default_rng(3)


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


def check_same_values(
    model: onnx.ModelProto, after: onnx.ModelProto, num_channels: int, run_onnx: Run
) -> tuple[np.ndarray, np.ndarray]:
    """Compare what two graphs compute of the same images, to a step where it is optimized; return images and values."""
    images_NCHW = (RNG.normal(size=(3, num_channels, 6, 6)) * 4).astype(np.float32)
    expected = run_onnx(model.SerializeToString(), images_NCHW)
    assert np.ptp(expected) > 5
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), images_NCHW), expected)
    optimized = run_onnx(after.SerializeToString(), images_NCHW, optimize=True)
    np.testing.assert_allclose(optimized, expected, rtol=0, atol=0.101)
    return images_NCHW, expected


@pytest.mark.parametrize("num_channels", [1, 2, 3, 5, 6, 7, 9])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (1, 7), (3, 1)])
def test_channels_of_weight_zero_change_nothing(num_channels: int, kernel: tuple[int, int], run_onnx: Run) -> None:
    model = stem(num_channels, kernel)
    after = passed(model)
    (pad,) = (node for node in after.graph.node if node.op_type == "Pad")
    assert pad.output[0] == f"{pad.input[0]}.padded"
    shapes = [array.dims for array in after.graph.initializer if len(array.dims) == 4]
    assert [shape[1] for shape in shapes] == [-(-num_channels // 4) * 4]
    check_same_values(model, after, num_channels, run_onnx)


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


def depthwise(
    num_channels: int, kernel: int, *, per_channel: bool = True, has_bias: bool = True, multiplier: int = 1
) -> onnx.ModelProto:
    draft = Draft()
    value = draft.quantize("images", 0.05, 90)
    num_outputs = num_channels * multiplier
    scales_O = RNG.uniform(0.005, 0.02, num_outputs) if per_channel else 0.01
    inputs = [value, draft.weight(RNG.integers(-127, 128, (num_outputs, 1, kernel, kernel)), scales_O)]
    if has_bias:
        bias, bias_scales = RNG.integers(-9000, 9000, num_outputs), np.float32(0.05) * np.float32(scales_O)
        zeros = np.zeros(np.shape(scales_O))
        operands = [(bias, np.int32), (bias_scales, np.float32), (zeros, np.int32)]
        inputs.append(draft.node("DequantizeLinear", [draft.array(*operand) for operand in operands], axis=0))
    pads = [kernel // 2] * 4
    value = draft.quantize(draft.node("Conv", inputs, pads=pads, strides=[2, 1], group=num_channels), 0.1, 128)
    return draft.finished(value, ("N", num_channels, 6, 6))


def padded(model: onnx.ModelProto) -> onnx.ModelProto:
    return passed(model, pad_depthwise)


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {array.name: numpy_helper.to_array(array) for array in model.graph.initializer}


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("per_channel", [True, False], ids=["scales", "one scale"])
@pytest.mark.parametrize(("num_channels", "kernel"), [(72, 3), (120, 3), (24, 5), (13, 7)])
def test_a_large_depthwise_convolution_has_a_multiple_of_16_channels(
    num_channels: int, kernel: int, per_channel: bool, has_bias: bool, run_onnx: Run, tmp_path: Path
) -> None:
    model = depthwise(num_channels, kernel, per_channel=per_channel, has_bias=has_bias)
    after = padded(model)
    types = types_of(after)
    assert (types["Pad"], types["Slice"]) == (1, 1)
    (weight,) = (array for array in stored(after).values() if array.ndim == 4)
    assert len(weight) % 16 == 0 and len(weight) - num_channels < 16
    assert {len(array) for name, array in stored(after).items() if name[0] == "a" and array.ndim} == {len(weight)}
    images_NCHW, expected = check_same_values(model, after, num_channels, run_onnx)
    kernels = kernels_of(after, tmp_path)
    assert (kernels.integer, kernels.float) == ({"QLinearConv": 1}, {})

    read = ir.serde.deserialize_model(after)
    assert drop_depthwise_padding(read.graph)
    remove_unused(read)
    undone = ir.serde.serialize_model(read)
    assert types_of(undone) == types_of(model)
    np.testing.assert_array_equal(run_onnx(undone.SerializeToString(), images_NCHW), expected)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(depthwise(64, 3), id="a multiple of 16"),
        pytest.param(depthwise(66, 3), id="small"),
        pytest.param(depthwise(40, 3, multiplier=2), id="two outputs for each input"),
        pytest.param(stem(6, (3, 3)), id="dense"),
    ],
)
def test_other_depthwise_convolutions_are_left_alone(model: onnx.ModelProto) -> None:
    after = padded(model)
    assert types_of(after) == types_of(model)
    assert not drop_depthwise_padding(ir.serde.deserialize_model(after).graph)


def test_scales_that_layers_share_stay(run_onnx: Run) -> None:
    draft = Draft()
    scales, zeros = draft.array(np.full(72, 0.01), np.float32), draft.array(np.zeros(72), np.int8)
    value = draft.quantize("images", 0.05, 90)
    for group in (72, 1):
        integers = draft.array(RNG.integers(-127, 128, (72, 72 // group, 3, 3)), np.int8)
        weight = draft.node("DequantizeLinear", [integers, scales, zeros], axis=0)
        value = draft.quantize(draft.node("Conv", [value, weight], group=group), 0.1, 128)
    model = draft.finished(value, ("N", 72, 6, 6))
    after = padded(model)
    by_channel = [array for name, array in stored(after).items() if name[0] == "a" and array.ndim == 1]
    assert sorted(map(len, by_channel)) == [72, 72, 80, 80]
    images_NCHW = (RNG.normal(size=(2, 72, 6, 6)) * 4).astype(np.float32)
    np.testing.assert_array_equal(
        run_onnx(after.SerializeToString(), images_NCHW), run_onnx(model.SerializeToString(), images_NCHW)
    )


@pytest.mark.parametrize("change", ["no axes", "steps", "another end"])
def test_slices_of_other_files_stay(change: str) -> None:
    model = padded(depthwise(72, 3))
    (cut,) = (node for node in model.graph.node if node.op_type == "Slice")
    if change == "no axes":
        del cut.input[3]
    else:
        model.graph.initializer.append(numpy_helper.from_array(np.array([2 if change == "steps" else 71]), "other"))
        if change == "steps":
            cut.input.append("other")
        else:
            cut.input[2] = "other"
    assert not drop_depthwise_padding(ir.serde.deserialize_model(model).graph)
