"""Files with scores of classes for each token, of texts of unequal length.

Shape legend: N texts, L tokens of the longest one, V tokens of all of them, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe import Context
from ptpipe_onnx import quantize_onnx, quantize_weights
from ptpipe_onnx.quantization.agreement import ConstantOutputError, _check, agreement, join_rows
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig
from ptpipe_onnx.quantization.weight_only import missing_quantizer
from ptpipe_torch import Data, LanguageModeling, LoaderOptions, OnnxFile

from ....texts import TAGS, text_data

Run = Callable[..., OnnxFile]
NUM_FEATURES = 32


@pytest.fixture(scope="module", params=[TAGS, LanguageModeling(vocabulary_size=40)], ids=["tags", "next tokens"])
def texts(request: pytest.FixtureRequest) -> Data:
    data = text_data(request.param, num=(16, 21, 21), min_length=1)
    return Data(data.info, data.splits, LoaderOptions(batch_size=4))


@pytest.fixture
def file_of(texts: Data, tmp_path: Path) -> Callable[[str, float], OnnxFile]:
    """Write a file of an embedding and a linear layer, whose weight is multiplied by a number."""

    def write(name: str, factor: float) -> OnnxFile:
        random, num_classes = np.random.default_rng(3), texts.info.task.outputs[0].sample_shape[1]
        table_VD, weight_DK = (random.normal(size=size) for size in ((40, NUM_FEATURES), (NUM_FEATURES, num_classes)))
        arrays = {"table": table_VD, "weight": weight_DK * factor}
        nodes = [
            helper.make_node("Gather", ["table", "tokens"], ["features"]),
            helper.make_node("MatMul", ["features", "weight"], ["logits"]),
        ]
        inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["N", "L"])]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", "L", num_classes])]
        stored = [numpy_helper.from_array(array.astype(np.float32), of) for of, array in arrays.items()]
        graph = helper.make_graph(nodes, "tokens", inputs, outputs, stored)
        path = tmp_path / f"{name}.onnx"
        onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        return OnnxFile(path, texts.info.signature)

    return write


@pytest.mark.parametrize("options", [{}, {"mode": "dynamic"}, {"bits": 8}])
def test_texts_with_a_class_for_each_token(options, texts, file_of, run_stage: Run, events) -> None:
    lengths = {batch.input_arrays()["tokens"].shape[1] for batch in texts.batches("test", batch_size=4)}
    assert len(lengths) > 1
    if (reason := missing_quantizer()) and "bits" in options:
        pytest.skip(reason)
    stage = quantize_weights if "bits" in options else quantize_onnx
    run_stage(stage, file_of("float", 1.0), texts, **options)
    metrics = events.metrics
    assert metrics["num_samples"] == 21 and metrics["top1_agreement"] > 0.9 and metrics["sqnr_db"] > 20


def test_scores_that_are_the_same_for_all_texts_are_refused(texts, file_of, tmp_path) -> None:
    ctx = Context("a", "quant.onnx", 7, tmp_path)
    usual, constant = file_of("usual", 1.0), file_of("constant", 0.0)
    with pytest.raises(ConstantOutputError, match="logits of the quantized file is the same for all 21 samples"):
        agreement(QuantizeOnnxConfig(), ctx, usual, constant, texts)
    assert agreement(QuantizeOnnxConfig(), ctx, constant, constant, texts)["top1_agreement"] == 1


def test_places_of_a_text_do_not_tell_texts_apart(texts: Data, tmp_path: Path) -> None:
    """Outputs of batches of unequal length, which differ from place to place, are those of no text."""
    ctx, batches = Context("a", "quant.onnx", 7, tmp_path), []
    of_place_LK = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for num_texts, length in ((2, 3), (3, 5), (1, 1)):
        tokens_NL = np.arange(num_texts)[:, None] + np.ones((num_texts, length), np.int64)
        own_NLK = np.broadcast_to(of_place_LK[:length], (num_texts, length, 3))
        batches.append(({"tokens": tokens_NL}, {"logits": own_NLK + tokens_NL[..., None]}, {"logits": own_NLK}))
    pair = join_rows(texts.info, ["logits"], batches)["logits"]
    with pytest.raises(ConstantOutputError, match="for all 6 samples"):
        _check(ctx, "logits", pair)
    second_NK = pair.second_NK.copy()
    second_NK[-2] += 1  # the last place of the longest texts
    _check(ctx, "logits", replace(pair, second_NK=second_NK))
