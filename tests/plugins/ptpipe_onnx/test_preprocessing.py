"""Normalization inside a file.

Shape legend: B images, H height, W width, C channels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import parser

from ptpipe_onnx.preprocessing import add_preprocessing
from ptpipe_torch import ImageInfo

CONVOLUTION = """
<ir_version: 10, opset_import: ["": 18]>
quantized (float[batch, {channels}, 8, 12] images) => (float[batch, 4, 6, 10] output)
<float scale = {{0.02}}, uint8 zero_point = {{114}}, int8[4, {channels}, 3, 3] weight = {{{weight}}},
 float[4] weight_scale = {{0.01, 0.02, 0.03, 0.04}}, int8[4] zeros = {{0, 0, 0, 0}}>
{{
    integers = QuantizeLinear(images, scale, zero_point)
    floats = DequantizeLinear(integers, scale, zero_point)
    weights = DequantizeLinear <axis = 0> (weight, weight_scale, zeros)
    sums = Conv(floats, weights)
    results = QuantizeLinear(sums, scale, zero_point)
    output = DequantizeLinear(results, scale, zero_point)
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
    weight = ", ".join(map(str, np.random.default_rng(0).integers(-127, 127, 4 * 9 * num_channels)))
    model = ir.from_proto(parser.parse_model(CONVOLUTION.format(channels=num_channels, weight=weight)))
    plain = ir.to_proto(model).SerializeToString()
    info = ImageInfo(
        shape_CHW=(num_channels, 8, 12), mean=(0.4, 0.5, 0.6)[:num_channels], std=(0.2, 0.3, 0.25)[:num_channels]
    )
    form = info.raw_form("images", layout)
    add_preprocessing(model.graph, {"images": form})
    content = ir.to_proto(model).SerializeToString()
    graph = optimized(content, tmp_path / "optimized.onnx")
    assert operators_behind(graph, "images")[: len(operators)] == operators

    images_BHWC = np.random.default_rng(1).integers(0, 256, (5, 8, 12, num_channels), np.uint8)
    images_BCHW = np.ascontiguousarray(np.moveaxis(images_BHWC, 3, 1))
    per_channel = (num_channels, 1, 1)
    scale, offset = (np.array(of, np.float32).reshape(per_channel) for of in (form.scale_C, form.offset_C))
    expected, found = (
        ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"images": images})[0]
        for file, images in (
            (plain, images_BCHW.astype(np.float32) * scale + offset),
            (content, images_BHWC if layout == "nhwc" else images_BCHW),
        )
    )
    assert np.array_equal(found, expected)
