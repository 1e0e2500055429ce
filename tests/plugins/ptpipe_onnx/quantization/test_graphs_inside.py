"""Files with graphs inside, of If, which ONNX Runtime's quantizer sorts and rewrites as if these read nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import GraphProto, TensorProto, helper

from ptpipe_onnx import quantize_onnx
from ptpipe_torch import Data, OnnxFile

from .test_post_training import Run, refused

RANDOM = np.random.default_rng(6)
ARRAYS = {
    "w": (RANDOM.normal(size=(256, 32)) / 16).astype(np.float32),
    "v": RANDOM.normal(size=(32, 10)).astype(np.float32),
    "limit": np.array(-1e9, np.float32),
}


def branch(operator: str, source: str) -> GraphProto:
    output = helper.make_tensor_value_info(f"{source}_{operator}", TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(operator, [source], [output.name])], "branch", [], [output])


def if_on(source: str, result: str) -> list:
    branches = {"then_branch": branch("Relu", source), "else_branch": branch("Neg", source)}
    return [
        helper.make_node("ReduceMax", ["flat"], [f"{result}_max"], keepdims=0),
        helper.make_node("Greater", [f"{result}_max", "limit"], [f"{result}_is_large"]),
        helper.make_node("If", [f"{result}_is_large"], [result], **branches),
    ]


@pytest.fixture
def file(file_of: Callable[..., OnnxFile]) -> OnnxFile:
    """Two If, of which the second one's graphs read what the first returns, as in a speech detector."""
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["hidden"]),
        *if_on("hidden", "first"),
        *if_on("first", "second"),
        helper.make_node("MatMul", ["second", "v"], ["logits"]),
    ]
    return file_of(nodes, ARRAYS)


@pytest.mark.parametrize("options", [{}, {"optimize": False}, {"mode": "dynamic"}])
def test_two_ifs_in_sequence(file: OnnxFile, digits: Data, run_stage: Run, options: dict) -> None:
    assert run_stage(quantize_onnx, file, digits, **options).parity["sqnr_db"] > 15


def test_qoperator_names_the_format_that_takes_them(file: OnnxFile, digits: Data, run_stage: Run) -> None:
    message = r"`format: qoperator`, since it has graphs inside \(of If or Loop\): leave that to qdq: Invalid model"
    refused(run_stage, message, file, digits, format="qoperator")
