"""Normalization inside a file.

Shape legend: B images, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import parser

from ptpipe_onnx.preprocessing import add_preprocessing
from ptpipe_torch import ImageInfo, InputForm, RawForm

CONVOLUTION = """
<ir_version: 10, opset_import: ["": 18]>
quantized (float[batch, {channels}, 8, 12] images) => (float[batch, 4, 6, 10] output)
<float scale = {{{scale}}}, uint8 zero_point = {{{zero_point}}}, int8[4, {channels}, 3, 3] weight = {{{weight}}},
 float result_scale = {{0.1}}, uint8 middle = {{128}},
 float[4] weight_scale = {{0.01, 0.02, 0.03, 0.04}}, int8[4] zeros = {{0, 0, 0, 0}}>
{{
    integers = QuantizeLinear(images, scale, zero_point)
    floats = DequantizeLinear(integers, scale, zero_point)
    weights = DequantizeLinear <axis = 0> (weight, weight_scale, zeros)
    sums = Conv(floats, weights)
    results = QuantizeLinear(sums, result_scale, middle)
    output = DequantizeLinear(results, result_scale, middle)
}}
"""


def optimized(content: bytes, path: Path) -> onnx.GraphProto:
    """Return the graph as ONNX Runtime computes it."""
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path), 3
    ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return onnx.load(path).graph


def operators_behind(graph: onnx.GraphProto, name: str) -> list[str]:
    """Return the operators from an input to the first QuantizeLinear."""
    found: list[str] = []
    while "QuantizeLinear" not in found:
        (node,) = (node for node in graph.node if name in node.input)
        found.append(node.op_type)
        name = node.output[0]
    return found


def convolution(num_channels: int, scale: float = 0.02, zero_point: int = 114) -> ir.Model:
    weight = ", ".join(map(str, np.random.default_rng(0).integers(-127, 127, 4 * 9 * num_channels)))
    text = CONVOLUTION.format(channels=num_channels, weight=weight, scale=scale, zero_point=zero_point)
    return ir.from_proto(parser.parse_model(text))


def normalized(mean: Sequence[float], std: Sequence[float], layout: InputForm) -> RawForm:
    return ImageInfo(shape_CHW=(len(mean), 8, 12), mean=tuple(mean), std=tuple(std)).raw_form("images", layout)


def assert_equal_outputs(plain: bytes, content: bytes, form: RawForm) -> None:
    """A file with normalization must compute what the one without computes of normalized values, to the bit."""
    images_BHWC = np.random.default_rng(1).integers(0, 256, (5, 8, 12, len(form.scale_C)), np.uint8)
    images_BCHW = np.ascontiguousarray(np.moveaxis(images_BHWC, 3, 1))
    scale, offset = (np.array(of, np.float32).reshape(-1, 1, 1) for of in (form.scale_C, form.offset_C))
    expected, found = (
        ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"images": images})[0]
        for file, images in (
            (plain, images_BCHW.astype(np.float32) * scale + offset),
            (content, images_BHWC if form.transpose else images_BCHW),
        )
    )
    assert np.array_equal(found, expected)
    assert len(np.unique(found)) > 50


NORMALIZATION = ["Cast", "Mul", "Add"]


@pytest.mark.parametrize(
    ("num_channels", "layout", "operators"),
    [
        (3, "nhwc", ["Reshape", "Transpose", *NORMALIZATION]),
        (3, "nchw", NORMALIZATION),
        (1, "nhwc", NORMALIZATION),
    ],
)
def test_channels_are_normalized_one_after_the_other(num_channels, layout, operators, tmp_path) -> None:
    model = convolution(num_channels)
    plain = ir.to_proto(model).SerializeToString()
    mean, std = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    form = normalized(mean[:num_channels], std[:num_channels], layout)
    add_preprocessing(model.graph, {"images": form})
    content = ir.to_proto(model).SerializeToString()
    graph = optimized(content, tmp_path / "optimized.onnx")
    assert operators_behind(graph, "images")[: len(operators)] == operators
    assert_equal_outputs(plain, content, form)


WHOLE = 1 / 255
"""Scale of numbers from 0 to 1 as bytes."""


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    ("mean", "std", "scale", "zero_point", "is_taken"),
    [
        ([0, 0, 0], [1, 1, 1], WHOLE, 0, True),
        ([0], [1], WHOLE, 0, True),
        ([0.1307], [0.3081], WHOLE / 0.3081, 33, True),  # of MNIST: 33.3
        ([0.5] * 3, [0.5] * 3, WHOLE / 0.5, 128, False),  # 127.5: every byte is halfway between two
        ([0, 0, 0], [1, 1, 1], 1.001 * WHOLE, 0, True),
        ([0, 0, 0], [1, 1, 1], 1.003 * WHOLE, 0, False),  # no image was white
        ([0, 0, 0], [1, 1, 1], 0.5 * WHOLE, 0, False),
        ([0, 0, 0], [1, 1, 1], WHOLE, 1, False),
        ([0, 0, 0.1], [1, 1, 1], WHOLE, 0, False),
    ],
)
def test_bytes_that_are_rounded_to_themselves_are_taken(mean, std, scale, zero_point, is_taken, layout) -> None:
    model = convolution(len(mean), scale, zero_point)
    plain = ir.to_proto(model).SerializeToString()
    form = normalized(mean, std, layout)
    add_preprocessing(model.graph, {"images": form})
    content = ir.to_proto(model)
    onnx.checker.check_model(content, full_check=True)
    assert ("Cast" not in [node.op_type for node in content.graph.node]) == is_taken
    assert_equal_outputs(plain, content.SerializeToString(), form)
