"""Gemm with factors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper

from ptpipe_onnx import quantize_onnx, quantize_weights
from ptpipe_onnx.quantization.weight_only import missing_quantizer
from ptpipe_torch import Data, OnnxFile

from .test_post_training import Run

RNG = np.random.default_rng(4)
ARRAYS = {
    "w": RNG.normal(size=(256, 10)).astype(np.float32),
    "b": (RNG.normal(size=10) * 9).astype(np.float32),
}


def file_with(file_of: Callable[..., OnnxFile], **factors: float) -> OnnxFile:
    """Flatten, then two Gemm of one weight and one bias, of which the second has factors."""
    nodes = [
        helper.make_node("Flatten", ["images"], ["x"]),
        helper.make_node("Gemm", ["x", "w", "b"], ["plain"], "plain"),
        helper.make_node("Gemm", ["x", "w", "b"], ["scaled"], "scaled", **factors),
        helper.make_node("Add", ["plain", "scaled"], ["logits"]),
    ]
    return file_of(nodes, ARRAYS)


@pytest.mark.parametrize("factors", [{"beta": 3.0}, {"alpha": 0.25, "beta": -2.0}])
@pytest.mark.parametrize("format_", ["qdq", "qoperator"])
def test_factors_are_part_of_weight_and_bias(
    factors: dict[str, float], format_: str, file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run, events
) -> None:
    quantized = run_stage(quantize_onnx, file_with(file_of, **factors), digits, format=format_)
    assert quantized.parity["sqnr_db"] > 25
    assert events.metrics["num_float_nodes"] == 0


def quantized_layers(file: OnnxFile, op_type: str) -> int:
    return [node.op_type for node in onnx.load(file.path).graph.node].count(op_type)


def test_dynamic_layers_with_factors(file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run) -> None:
    quantized = run_stage(quantize_onnx, file_with(file_of, alpha=0.25, beta=-2.0), digits, mode="dynamic")
    assert quantized.parity["sqnr_db"] > 25 and quantized_layers(quantized, "MatMulInteger") == 2


@pytest.mark.skipif(missing_quantizer() is not None, reason=str(missing_quantizer()))
def test_weights_of_layers_with_factors(file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run) -> None:
    quantized = run_stage(quantize_weights, file_with(file_of, alpha=0.25, beta=-2.0), digits)
    assert quantized.parity["sqnr_db"] > 15 and quantized_layers(quantized, "MatMulNBits") == 2
