"""Float files whose weights are not float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, TensorProto, helper, numpy_helper

from ptpipe import Context, Stage
from ptpipe_onnx import quantize_onnx, quantize_weights
from ptpipe_onnx.quantization.float32 import OTHER_PRECISIONS, in_float32
from ptpipe_onnx.quantization.weight_only import missing_quantizer
from ptpipe_torch import Data, OnnxFile

from .test_post_training import Run, images_of, logits, refused

WEIGHT_ONLY = pytest.param(
    quantize_weights, {}, marks=pytest.mark.skipif(missing_quantizer() is not None, reason=str(missing_quantizer()))
)


def scaled_by(factor: float, type_: int, dtype: str) -> GraphProto:
    """Return a branch that multiplies `flat` by a constant of that type."""
    stored = numpy_helper.from_array(np.array(factor, dtype))
    nodes = [
        helper.make_node("Constant", [], ["factor"], value=stored),
        helper.make_node("Mul", ["flat", "factor"], ["product"]),
    ]
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("product", type_, None)])


@pytest.fixture(params=["float16", "float64"])
def file(request: pytest.FixtureRequest, file_of: Callable[..., OnnxFile]) -> OnnxFile:
    """A file that computes in that type, also in a graph inside, and takes and returns float32."""
    dtype, type_ = request.param, OTHER_PRECISIONS[request.param]
    random = np.random.default_rng(6)
    arrays = {
        "w": (random.normal(size=(256, 32)) / 16).astype(dtype),
        "v": random.normal(size=(32, 10)).astype(dtype),
        "yes": np.array(True),
    }
    branches = {name: scaled_by(factor, type_, dtype) for name, factor in (("then_branch", 2), ("else_branch", 3))}
    nodes = [
        helper.make_node("Cast", ["images"], ["cast"], to=type_),
        helper.make_node("Flatten", ["cast"], ["flat"]),
        helper.make_node("If", ["yes"], ["scaled"], **branches),
        helper.make_node("MatMul", ["scaled", "w"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["positive"]),
        helper.make_node("MatMul", ["positive", "v"], ["result"]),
        helper.make_node("Cast", ["result"], ["logits"], to=TensorProto.FLOAT),
    ]
    written = file_of(nodes, arrays)
    return OnnxFile(written.path, written.signature, dtype)


@pytest.mark.parametrize(("stage", "options"), [(quantize_onnx, {}), (quantize_onnx, {"mode": "dynamic"}), WEIGHT_ONLY])
def test_its_weights_become_integers(
    stage: Stage[..., OnnxFile], options: dict[str, Any], file: OnnxFile, digits: Data, run_stage: Run
) -> None:
    quantized = run_stage(stage, file, digits, **options)
    assert quantized.parity["sqnr_db"] > 15
    stored = onnx.load(quantized.path).graph.initializer
    assert not {tensor.data_type for tensor in stored} & {*OTHER_PRECISIONS.values()}
    is_integer = [tensor.data_type != TensorProto.FLOAT for tensor in stored if np.prod(tensor.dims) > 256]
    assert is_integer and all(is_integer)


def test_in_float32_it_computes_the_same(file: OnnxFile, digits: Data, tmp_path: Path) -> None:
    images_NCHW = images_of(digits)[:4]
    expected_NK = logits(file, images_NCHW)
    ctx = Context("quantized", "quant.onnx", 7, tmp_path)
    same = in_float32(ctx, file)
    assert same.precision == "float32" and in_float32(ctx, same) is same
    np.testing.assert_allclose(logits(same, images_NCHW), expected_NK, atol=0.005 * np.abs(expected_NK).max())


def test_a_result_without_integer_weights_is_refused(
    file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run
) -> None:
    """Its activations alone would be rounded."""
    nodes = [
        helper.make_node("GlobalMaxPool", ["images"], ["max"]),
        helper.make_node("Flatten", ["max"], ["flat"]),
        helper.make_node("Concat", ["flat"] * 10, ["logits"], axis=1),
    ]
    refused(run_stage, "no node that mode static quantizes: leave the stage out", file_of(nodes, {}), digits)
