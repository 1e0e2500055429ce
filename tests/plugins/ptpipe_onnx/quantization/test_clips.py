"""Layers whose outputs are read before and behind a ReLU or Clip."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from ptpipe_onnx import quantize_onnx
from ptpipe_onnx.quantization.clips import shared_clips
from ptpipe_torch import Data, OnnxFile

from .test_post_training import Run

RNG = np.random.default_rng(3)
ARRAYS = {
    "w": RNG.normal(size=(8, 1, 3, 3)).astype(np.float32),
    "b": RNG.normal(size=8).astype(np.float32) / 2,
    "w2": RNG.normal(size=(8, 8, 3, 3)).astype(np.float32) / 8,
    "low": np.array(-0.5, np.float32),
    "high": np.array(1, np.float32),
    "k": RNG.normal(size=(8, 10)).astype(np.float32),
}


def nodes_of(clip: str, *, is_residual: bool, features: str = "features") -> list[NodeProto]:
    """Two convolutions and an activation; `is_residual`: the first one's outputs are added to the second's."""
    bounds = ["low", "high"] if clip == "Clip" else []
    pads = [1, 1, 1, 1]
    return [
        helper.make_node("Conv", ["images", "w", "b"], [features], pads=pads),
        helper.make_node(clip, [features, *bounds], ["active"], "clip"),
        helper.make_node("Conv", ["active", "w2", "b"], ["second"], pads=pads),
        *([helper.make_node("Add", ["second", features], ["sum"])] if is_residual else []),
        helper.make_node("GlobalAveragePool", ["sum" if is_residual else "second"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "k"], ["logits"]),
    ]


def noise_db(file: OnnxFile, quantized: OnnxFile, data: Data) -> dict[str, float]:
    (batch,) = data.batches("test", batch_size=len(data.splits["test"]))
    with file.predictor(1) as predict, quantized.predictor(1) as predict_quantized:
        expected, found = predict(batch.input_arrays()), predict_quantized(batch.input_arrays())
    ratios = {
        name: np.square(values).sum() / np.square(values - found[name]).sum() for name, values in expected.items()
    }
    return {name: 10 * float(np.log10(ratio)) for name, ratio in ratios.items()}


@pytest.mark.parametrize(
    ("clip", "format_", "optimize"),
    [("Relu", "qdq", True), ("Relu", "qdq", False), ("Clip", "qdq", True), ("Relu", "qoperator", False)],
)
def test_an_output_that_is_also_clipped_keeps_its_range(
    clip: str, format_: str, optimize: bool, file_of: Callable[..., OnnxFile], unlabeled: Data, run_stage: Run
) -> None:
    file = file_of(nodes_of(clip, is_residual=False), ARRAYS, features=(8, 16, 16))
    quantized = run_stage(quantize_onnx, file, unlabeled, format=format_, optimize=optimize)
    assert min(noise_db(file, quantized, unlabeled).values()) > 30
    assert sum(node.op_type == clip for node in onnx.load(quantized.path).graph.node) == 1


@pytest.mark.parametrize("clip", ["Relu", "Clip"])
@pytest.mark.parametrize("format_", ["qdq", "qoperator"])
def test_a_residual_that_is_also_clipped(
    clip: str, format_: str, file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run
) -> None:
    file = file_of(nodes_of(clip, is_residual=True, features="first"), ARRAYS)
    quantized = run_stage(quantize_onnx, file, digits, format=format_)
    assert noise_db(file, quantized, digits)["logits"] > 28


def test_which_clips_are_shared() -> None:
    def output(name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    def found(nodes: list[NodeProto], format_: str) -> list[str]:
        return shared_clips(helper.make_graph(nodes, "g", [], [output("logits")]), format_)

    alone, residual = (nodes_of("Relu", is_residual=is_residual) for is_residual in (False, True))
    assert [found(alone, "qdq"), found(alone, "qoperator")] == [[], []]
    assert [found(residual, "qdq"), found(residual, "qoperator")] == [[], ["clip"]]
    branch = helper.make_graph(
        [helper.make_node("Neg", ["features"], ["negative"])], "branch", [], [output("negative")]
    )
    inside = helper.make_node("If", ["condition"], ["other"], "if", then_branch=branch, else_branch=branch)
    assert [found([*alone, inside], "qdq"), found([*alone, inside], "qoperator")] == [["clip"], ["clip"]]
