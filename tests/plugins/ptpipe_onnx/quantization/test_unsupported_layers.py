"""Layers that ONNX Runtime's quantizer fails on: they stay float, or the error names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

from ptpipe import StageError
from ptpipe_onnx import quantize_onnx
from ptpipe_torch import Data, OnnxFile

from .test_post_training import Run

RNG = np.random.default_rng(8)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("options", [{"mode": "dynamic"}, {"format": "qoperator"}])
def test_products_with_several_matrices_stay_float(
    options: dict[str, Any], file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run, log: Callable[[], str]
) -> None:
    nodes = [
        helper.make_node("Reshape", ["images", "parts"], ["x"]),
        helper.make_node("MatMul", ["x", "several"], ["y"], "batched"),
        helper.make_node("Flatten", ["y"], ["flat"]),
        helper.make_node("MatMul", ["flat", "k"], ["logits"], "last"),
    ]
    arrays = {"parts": np.array([-1, 4, 1, 64]), "several": normal(4, 64, 8), "k": normal(32, 10)}
    quantized = run_stage(quantize_onnx, file_of(nodes, arrays), digits, **options)
    assert quantized.parity["sqnr_db"] > 25
    assert "no integer operator has a scale for each channel of several matrices: batched" in log()


def test_transposed_convolutions_of_groups_with_a_bias_stay_float(
    file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run, log: Callable[[], str]
) -> None:
    nodes = [
        helper.make_node("Conv", ["images", "w", "b"], ["x"], strides=[2, 2]),
        helper.make_node("ConvTranspose", ["x", "w2", "b"], ["y"], "transposed", group=2),
        helper.make_node("GlobalAveragePool", ["y"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "k"], ["logits"]),
    ]
    arrays = {"w": normal(6, 1, 3, 3), "w2": normal(6, 3, 3, 3), "b": normal(6), "k": normal(6, 10)}
    quantized = run_stage(quantize_onnx, file_of(nodes, arrays), digits)
    assert quantized.parity["sqnr_db"] > 25
    assert "biases of groups of transposed convolutions: transposed" in log()


def test_a_gemm_with_an_empty_name_for_its_bias(file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run) -> None:
    nodes = [helper.make_node("Flatten", ["images"], ["x"]), helper.make_node("Gemm", ["x", "k", ""], ["logits"])]
    quantized = run_stage(quantize_onnx, file_of(nodes, {"k": normal(256, 10)}), digits, mode="dynamic")
    assert quantized.parity["sqnr_db"] > 25


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_weight_that_is_not_finite_is_named(
    mode: str, file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run
) -> None:
    weight = normal(256, 10)
    weight[3, 4] = np.nan
    nodes = [
        helper.make_node("Flatten", ["images"], ["x"]),
        helper.make_node("MatMul", ["x", "head.weight"], ["logits"], "last"),
    ]
    with pytest.raises(StageError, match=r"head\.weight, which last reads, has values that are not finite"):
        run_stage(quantize_onnx, file_of(nodes, {"head.weight": weight}), digits, mode=mode)
