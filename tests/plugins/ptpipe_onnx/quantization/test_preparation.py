"""Files of forms that ONNX Runtime's quantizers do not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ptpipe import Stage
from ptpipe_onnx import quantize_onnx, quantize_weights
from ptpipe_onnx.quantization.weight_only import missing_quantizer
from ptpipe_torch import Data, OnnxFile

from .test_post_training import Run

ARRAYS = {
    "w": np.random.default_rng(6).normal(size=(256, 10)).astype(np.float32),
    "b": np.random.default_rng(7).normal(size=10).astype(np.float32),
}
WEIGHT_ONLY = pytest.param(
    quantize_weights, {}, marks=pytest.mark.skipif(missing_quantizer() is not None, reason=str(missing_quantizer()))
)


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize(("stage", "options"), [(quantize_onnx, {}), (quantize_onnx, {"mode": "dynamic"}), WEIGHT_ONLY])
def test_weights_among_the_inputs(
    opset: int,
    stage: Stage[..., OnnxFile],
    options: dict[str, Any],
    file_of: Callable[..., OnnxFile],
    digits: Data,
    run_stage: Run,
) -> None:
    """As in files of IR version 3."""
    nodes = [helper.make_node("Flatten", ["images"], ["x"]), helper.make_node("Gemm", ["x", "w", "b"], ["logits"])]
    file = file_of(nodes, ARRAYS, opset=opset)
    content = onnx.load(file.path)
    content.ir_version = 3
    content.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in ARRAYS.items()
    )
    onnx.save_model(content, file.path)
    quantized = run_stage(stage, file, digits, **options)
    assert quantized.parity["sqnr_db"] > 15
    assert [value.name for value in onnx.load(quantized.path).graph.input] == ["images"]
