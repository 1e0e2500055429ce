"""quant.onnx: ONNX Runtime's own quantizer as a stage. Shape legend: N samples, C channels, K classes."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError

from ptpipe import Context, StageError
from ptpipe_onnx import quantize_onnx
from ptpipe_onnx.quantization.agreement import agreement
from ptpipe_onnx.quantization.calibration import CalibrationReader
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig
from ptpipe_torch import ArrayColumn, Data, OnnxFile
from ptpipe_torch.model.exact_session import may_saturate

from ....datasets import image_split
from ..conftest import RecordedEvents

Run = Callable[..., OnnxFile]


def images_of(data: Data, split: str = "test") -> np.ndarray:
    (batch,) = data.batches(split, batch_size=len(data.splits[split]))
    return batch.input_arrays()["images"]


def logits(file: OnnxFile, images_NCHW: np.ndarray) -> np.ndarray:
    with file.predictor(1) as predict:
        return predict({"images": images_NCHW})["logits"]


def accuracy(file: OnnxFile, data: Data) -> float:
    labels_N = np.asarray(data.splits["test"].targets["labels"].take(np.arange(len(data.splits["test"]))))
    return float(np.mean(logits(file, images_of(data)).argmax(1) == labels_N))


def with_calibration(data: Data, pixels_NHWC: np.ndarray) -> Data:
    ids = np.array([f"calibration/{number:05d}" for number in range(len(pixels_NHWC))])
    split = image_split(ids, np.zeros(len(ids), np.int64), ArrayColumn(pixels_NHWC))
    return Data(data.info, {**data.splits, "calibration": split}, data.loader)


def test_it_is_what_a_plain_call_of_the_quantizer_gives(float_file, digits, run_stage, tmp_path) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quant_pre_process, quantize_static

    batches = [{"images": images_of(digits, "calibration")}]

    class Reader:
        def get_next(self) -> dict[str, np.ndarray] | None:
            return batches.pop() if batches else None

    quant_pre_process(str(float_file.path), str(tmp_path / "prepared.onnx"))
    quantize_static(
        str(tmp_path / "prepared.onnx"),
        str(tmp_path / "plain.onnx"),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    plain = OnnxFile(tmp_path / "plain.onnx", float_file.signature)
    images_NCHW = images_of(digits)
    file = run_stage(quantize_onnx, float_file, digits, reduce_range=False, optimize=False)
    np.testing.assert_array_equal(logits(file, images_NCHW), logits(plain, images_NCHW))


@pytest.mark.parametrize(
    ("options", "reduced"),
    [({}, may_saturate()), ({"weight_type": "uint8"}, False), ({"reduce_range": True, "mode": "dynamic"}, True)],
)
def test_weights_have_seven_bits_where_sums_would_saturate(
    options, reduced, float_file, digits, run_stage: Run, events
) -> None:
    assert quantize_onnx.fingerprint(QuantizeOnnxConfig(**options)) == (
        None if "reduce_range" in options else {"reduce_range": reduced}
    )
    file = run_stage(quantize_onnx, float_file, digits, **options)
    assert events.metrics["reduce_range"] is reduced
    type_ = TensorProto.UINT8 if "weight_type" in options else TensorProto.INT8
    weights = [
        numpy_helper.to_array(tensor).astype(int)
        for tensor in onnx.load(file.path).graph.initializer
        if tensor.data_type == type_ and len(tensor.dims) > 1
    ]
    assert len(weights) >= 1
    assert (max(int(np.ptp(weight)) for weight in weights) <= 128) is reduced


@pytest.mark.parametrize(
    ("options", "format_", "size"),
    [
        ({}, "onnx int8", 0.6),
        ({"format": "qoperator", "per_channel": False, "weight_type": "uint8"}, "onnx int8", 0.6),
        ({"calibrate_method": "entropy"}, "onnx int8", 0.6),
        ({"calibrate_method": "percentile", "percentile": 99.9, "activation_type": "int8"}, "onnx int8", 0.6),
        ({"mode": "dynamic"}, "onnx int8 dynamic", 0.8),
    ],
    ids=["default", "qoperator", "entropy", "percentile", "dynamic"],
)
def test_every_way_keeps_the_accuracy(options, format_, size, float_file, digits, run_stage: Run, events) -> None:
    file = run_stage(quantize_onnx, float_file, digits, **options)
    assert file.format == format_
    assert file.size_bytes < size * float_file.size_bytes
    assert accuracy(file, digits) >= accuracy(float_file, digits) - 0.01
    metrics = events.metrics
    assert metrics["num_int8_nodes"] >= 2
    assert metrics["top1_agreement"] >= 0.98 and metrics["sqnr_db"] > 20
    assert file.parity["top1_agreement"] == metrics["top1_agreement"]
    assert metrics["num_samples"] == len(digits.splits["test"])


def test_the_figures_are_those_of_the_files(float_file, digits, run_stage: Run, events: RecordedEvents) -> None:
    file = run_stage(quantize_onnx, float_file, digits)
    expected, found = (logits(one, images_of(digits)) for one in (float_file, file))
    rms = float(np.sqrt(np.mean((found - expected) ** 2)))
    assert events.metrics["rms_logit_difference"] == pytest.approx(rms, rel=1e-5)
    sqnr_db = 20 * np.log10(np.sqrt(np.mean(expected**2)) / rms)
    assert events.metrics["sqnr_db"] == pytest.approx(sqnr_db, abs=0.006)


def test_ranges_do_not_depend_on_the_batch_size(float_file, digits, run_stage: Run) -> None:
    files = []
    for batch_size in (5, 16):
        data = Data(digits.info, digits.splits, replace(digits.loader, batch_size=batch_size))
        files.append(run_stage(quantize_onnx, float_file, data).path.read_bytes())
    assert files[0] == files[1]


def test_metadata_says_how_it_was_made(float_file, digits, run_stage: Run) -> None:
    file = run_stage(quantize_onnx, float_file, digits)
    stored, of_float = (
        {entry.key: entry.value for entry in onnx.load(one.path).metadata_props} for one in (file, float_file)
    )
    assert stored["precision"] == "int8" and stored["quantizer"].startswith("onnxruntime ")
    assert stored["signature"] == of_float["signature"] and stored["task"] == of_float["task"]
    assert stored["export.onnx options"] == of_float["export.onnx options"]
    assert json.loads(stored["quant.onnx options"])["mode"] == "static"
    assert file.signature == float_file.signature
    assert [own.domain for own in onnx.load(file.path).opset_import] == [""]


@pytest.mark.parametrize(
    ("pattern", "floats"), [("Conv", {"Conv"}), ("node_Conv_*", {"Conv"}), ("5", {"Gemm"}), ("7", {"Gemm"})]
)
def test_skipped_nodes_stay_float(pattern, floats, float_file, digits, run_stage: Run, events) -> None:
    run_stage(quantize_onnx, float_file, digits)
    before = events.metrics["num_float_nodes"]
    file = run_stage(quantize_onnx, float_file, digits, skip=[pattern])
    assert events.metrics["num_skipped_nodes"] >= 1 and events.metrics["num_float_nodes"] > before
    graph = onnx.load(file.path).graph
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert TensorProto.FLOAT in {stored.get(node.input[1]) for node in graph.node if node.op_type in floats}


def test_nothing_of_the_tools_is_printed_and_logging_stays(
    float_file, digits, run_stage: Run, capsys, log: Callable[[], str]
) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    run_stage(quantize_onnx, float_file, digits, calibrate_method="entropy")
    assert (root.level, list(root.handlers)) == before
    assert capsys.readouterr().out == ""
    assert log().count("Collecting tensor data") == 1, "in the run's log"


def test_progress_is_that_of_the_calibration(float_file, digits, run_stage: Run, events: RecordedEvents) -> None:
    run_stage(quantize_onnx, float_file, digits, num_samples=40)
    done = [(event.done, event.total) for event in events if type(event).__name__ == "Progress"]
    assert done[:3] == [(16, 40), (32, 40), (40, 40)]


def test_a_mask_of_attention_stays_float(
    transformer_file, words, run_stage: Run, events, log, tmp_path, monkeypatch
) -> None:
    """Quantized, it leaves nothing of the scores: then the labels of these texts agree in 62 %."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run_stage(quantize_onnx, transformer_file, words)
    assert events.metrics["top1_agreement"] == 1.0 and events.metrics["sqnr_db"] > 30
    assert events.metrics["num_int8_nodes"] >= 20
    assert "attention masks: " in log() and log().count("node_Softmax") == 2
    run_stage(quantize_onnx, transformer_file, words, mode="dynamic")
    assert events.metrics["top1_agreement"] == 1.0
    assert list(here.iterdir()) == [], "the tools write nothing into the working directory"


def test_what_reads_masked_scores_stays_float(file_of, unlabeled, run_stage: Run, log) -> None:
    """As of actions that a state does not allow: quantized with the mask, all other scores would be 0."""
    arrays = {
        "weight": np.random.default_rng(0).normal(0, 0.05, (10, 256)).astype(np.float32),
        "is_allowed": np.array([[True] * 7 + [False] * 3]),
        "low": np.float32(-1e8),
    }
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "weight"], ["scores"], "scores", transB=1),
        helper.make_node("Where", ["is_allowed", "scores", "low"], ["logits"], "masked"),
        helper.make_node("ArgMax", ["logits"], ["chosen"], "choose", axis=1, keepdims=1),
        helper.make_node("Cast", ["chosen"], ["features"], "cast", to=TensorProto.FLOAT),
    ]
    float_file = file_of(nodes, arrays, features=(1,))
    images_NCHW = images_of(unlabeled)
    expected_NK = logits(float_file, images_NCHW)[:, :7]
    found_NK = logits(run_stage(quantize_onnx, float_file, unlabeled), images_NCHW)[:, :7]
    assert np.abs(found_NK - expected_NK).max() < 0.05 * np.abs(expected_NK).max()
    assert "attention masks: masked, choose" in log()


def fixed_batch_file(path: Path, file: OnnxFile, batch_size: int) -> OnnxFile:
    """The file as another program would write it, for one batch size and without names of nodes."""
    content = onnx.load(file.path)
    for value in (*content.graph.input, *content.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch_size
    for node in content.graph.node:
        node.name = ""
    del content.metadata_props[:], content.graph.value_info[:]
    onnx.save_model(content, path)
    return OnnxFile(path, file.signature)


def test_a_foreign_file_of_one_batch_size(float_file, digits, run_stage: Run, tmp_path) -> None:
    foreign = fixed_batch_file(tmp_path / "foreign.onnx", float_file, 7)
    file = run_stage(quantize_onnx, foreign, digits, num_samples=50)
    assert accuracy(file, digits) >= accuracy(float_file, digits) - 0.01


def refused(run: Run, message: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(StageError, match=message) as raised:
        run(quantize_onnx, *arguments, **options)
    assert "\n" not in str(raised.value)


def test_nothing_is_left_where_it_fails(float_file, digits, run_stage: Run, tmp_path) -> None:
    class Broken(Data):
        def batches(self, split: str, **options: Any) -> Any:
            yield from islice(super().batches(split, **options), 1)
            raise StageError("unreadable")

    refused(run_stage, "unreadable", float_file, Broken(digits.info, digits.splits, digits.loader))
    refused(run_stage, "no node that mode static quantizes", float_file, digits, skip=["*"])
    assert [path for folder in tmp_path.iterdir() for path in folder.iterdir()] == []


def test_a_file_that_is_quantized_is_refused(float_file, digits, run_stage: Run) -> None:
    refused(run_stage, "int8 already", run_stage(quantize_onnx, float_file, digits), digits)


def test_a_skip_that_matches_nothing_is_refused(float_file, digits, run_stage: Run) -> None:
    refused(run_stage, "'Cnv', which matches no node .did you mean 'Conv'", float_file, digits, skip=["Cnv"])
    refused(run_stage, "no node that mode static quantizes", float_file, digits, skip=["*"])


def test_calibration_data_of_no_use_is_refused(float_file, digits, run_stage: Run) -> None:
    pixels_NHWC = np.full((20, 16, 16, 1), 9, np.uint8)
    refused(
        run_stage,
        r"all 20 samples of calibration are the same .images is 9",
        float_file,
        with_calibration(digits, pixels_NHWC),
    )
    refused(run_stage, "calibration has 1 sample, and", float_file, with_calibration(digits, pixels_NHWC[:1]))
    refused(run_stage, "calibration has 0 samples", float_file, with_calibration(digits, pixels_NHWC[:0]))
    refused(run_stage, "no samples in val", float_file, digits, compare_split="val")


def test_a_calibration_sample_that_is_not_finite_is_named(digits, tmp_path) -> None:
    class Broken(Data):
        def batches(self, split: str, **options: Any) -> Any:
            for number, batch in enumerate(super().batches(split, **options)):
                if number == 1:
                    batch.inputs["images"][3, 0, 2, 2] = float("nan")
                yield batch

    data = Broken(digits.info, digits.splits, digits.loader)
    reader = CalibrationReader(Context("a", "quant.onnx", 7, tmp_path), data, "calibration", 40, None)
    reader.set_range(0, 3)
    assert len(reader) == 3 and reader.get_next() is not None
    with pytest.raises(StageError, match=r"images of calibration/00019 \(split calibration\) is not finite"):
        reader.get_next()


def test_data_workers_end_with_the_stage(float_file, digits, run_stage: Run) -> None:
    """The quantizer leaves the last batches unread: the garbage collector would wait 5 s for each worker."""
    before = multiprocessing.active_children()
    data = Data(digits.info, digits.splits, replace(digits.loader, num_workers=2))
    gc.disable()
    try:
        run_stage(quantize_onnx, float_file, data)
        assert multiprocessing.active_children() == before
    finally:
        gc.enable()


def linear_file(
    path: Path, float_file: OnnxFile, weight_DK: np.ndarray, opset: int = 17, bias: float = 0.0
) -> OnnxFile:
    """Flatten and Gemm."""
    tensor = helper.make_tensor_value_info
    ends = [tensor("images", TensorProto.FLOAT, ["N", 1, 16, 16]), tensor("logits", TensorProto.FLOAT, ["N", 10])]
    nodes = [helper.make_node("Flatten", ["images"], ["x"]), helper.make_node("Gemm", ["x", "w", "b"], ["logits"])]
    arrays = {"w": weight_DK.astype(np.float32), "b": np.full(10, bias, np.float32)}
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], weights)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return OnnxFile(path, float_file.signature)


@pytest.mark.parametrize("shape", [(1, 10), (1,), (1, 1)])
def test_biases_of_other_shapes(shape, float_file, digits, run_stage: Run, tmp_path) -> None:
    """TensorFlow and JAX write (1, outputs); the quantizer takes one value for each output."""
    weight_DK = np.random.default_rng(0).normal(size=(256, 10))
    file = linear_file(tmp_path / "linear.onnx", float_file, weight_DK)
    content = onnx.load(file.path)
    bias = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    content.graph.initializer[1].CopyFrom(numpy_helper.from_array(bias, "b"))
    onnx.save_model(content, file.path)
    quantized = run_stage(quantize_onnx, file, digits)
    assert quantized.parity["sqnr_db"] > 25
    (stored,) = (own for own in onnx.load(quantized.path).graph.initializer if own.name == "b_quantized")
    assert list(stored.dims) == [10]


def test_a_bias_of_two_layers_beside_a_tensor_of_a_like_name(float_file, digits, run_stage: Run, tmp_path) -> None:
    """The quantizer copies the bias `b` as `b0`, which is taken here."""
    weight_DK = np.random.default_rng(0).normal(size=(256, 10))
    file = linear_file(tmp_path / "linear.onnx", float_file, weight_DK)
    content = onnx.load(file.path)
    first = content.graph.node[-1]
    second = type(first).FromString(first.SerializeToString())
    first.output[0], second.output[0], second.input[1] = "b0", "sums", "w2"
    content.graph.initializer.append(numpy_helper.from_array(weight_DK[:, ::-1].astype(np.float32), "w2"))
    content.graph.node.extend([second, helper.make_node("Add", ["b0", "sums"], ["logits"])])
    onnx.save_model(content, file.path)
    quantized = run_stage(quantize_onnx, file, digits)
    assert quantized.parity["sqnr_db"] > 25


def scaled(path: Path, file: OnnxFile) -> OnnxFile:
    """Flatten, then scale as scikit-learn's files do: ONNX infers no types behind operators of its `ai.onnx.ml`."""
    content = onnx.load(file.path)
    flatten, gemm = content.graph.node
    scaler = helper.make_node("Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", offset=[0.0] * 256, scale=[1.0] * 256)
    softmax = helper.make_node("Softmax", ["sums"], ["chances"])
    last = helper.make_node("Identity", ["chances"], ["logits"])
    gemm.input[0], gemm.output[0] = "scaled", "sums"
    nodes = [flatten, scaler, gemm, softmax, last]
    copies = [type(gemm).FromString(node.SerializeToString()) for node in nodes]
    del content.graph.node[:]
    content.graph.node.extend(copies)
    content.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    onnx.save_model(content, path)
    return OnnxFile(path, file.signature)


def test_a_network_of_another_librarys_operators(float_file, digits, run_stage: Run, events, tmp_path) -> None:
    weight_DK = np.random.default_rng(0).normal(size=(256, 10))
    file = scaled(tmp_path / "scaled.onnx", linear_file(tmp_path / "linear.onnx", float_file, weight_DK))
    quantized = run_stage(quantize_onnx, file, digits, optimize=False)
    assert quantized.parity["top1_agreement"] > 0.98 and events.metrics["num_int8_nodes"] >= 2


@pytest.mark.parametrize("domains", [[], [""], ["", ""], ["ai.onnx"]])
def test_a_file_without_a_node_of_onnx_itself(domains, float_file, digits, run_stage: Run, tmp_path) -> None:
    """As forests of scikit-learn, which declare ONNX's own operators twice."""
    file = linear_file(tmp_path / "linear.onnx", float_file, np.ones((256, 10)))
    content = onnx.load(file.path)
    del content.graph.node[:], content.graph.initializer[:], content.opset_import[:]
    content.graph.node.append(
        helper.make_node("Scaler", ["images"], ["logits"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0])
    )
    content.opset_import.extend(
        helper.make_opsetid(*own) for own in [("ai.onnx.ml", 1), *((name, 17) for name in domains)]
    )
    for value in (*content.graph.input, *content.graph.output):
        value.type.tensor_type.ClearField("shape")
    onnx.save_model(content, file.path)
    refused(run_stage, "no node that mode static quantizes: leave the stage out", file, digits)


def test_outputs_of_no_use_are_refused(float_file, digits, tmp_path) -> None:
    weight_DK = np.random.default_rng(0).normal(size=(256, 10))
    ctx = Context("a", "quant.onnx", 7, tmp_path)
    constant = linear_file(tmp_path / "constant.onnx", float_file, weight_DK * 0)
    with pytest.raises(StageError, match="logits of the quantized file is the same for all 300 samples"):
        agreement(QuantizeOnnxConfig(), ctx, float_file, constant, digits)
    infinite = linear_file(tmp_path / "infinite.onnx", float_file, np.full((256, 10), 3e38))
    with pytest.raises(StageError, match="logits of the quantized file has values that are not finite"):
        agreement(QuantizeOnnxConfig(), ctx, float_file, infinite, digits)
    assert agreement(QuantizeOnnxConfig(), ctx, constant, constant, digits)["top1_agreement"] == 1.0
    nearly = linear_file(tmp_path / "nearly.onnx", float_file, weight_DK * 1e-7, bias=1.0)  # as an untrained detector
    constant = linear_file(tmp_path / "constant.onnx", float_file, weight_DK * 0, bias=1.0)
    assert agreement(QuantizeOnnxConfig(), ctx, nearly, constant, digits)["max_abs_logit_difference"] > 0


def test_an_opset_too_old_is_converted(float_file, digits, run_stage: Run, tmp_path) -> None:
    weight_DK = np.random.default_rng(0).normal(size=(256, 10))
    old = linear_file(tmp_path / "old.onnx", float_file, weight_DK, opset=9)
    file = run_stage(quantize_onnx, old, digits)
    assert file.parity["sqnr_db"] > 20


def test_an_opset_that_cannot_be_converted_is_refused_with_the_reason(
    float_file, digits, run_stage: Run, tmp_path
) -> None:
    old = linear_file(tmp_path / "old.onnx", float_file, np.ones((256, 10)), opset=9)
    content = onnx.load(old.path)
    content.graph.node.insert(0, helper.make_node("ThresholdedRelu", ["images"], ["above"], alpha=0.1))
    content.graph.node[1].input[0] = "above"
    onnx.save_model(content, old.path)
    with old.predictor(1) as predict:
        assert predict({"images": np.ones((2, 1, 16, 16), np.float32)})["logits"].shape == (2, 10), "the file is sound"
    with pytest.raises(StageError) as raised:
        run_stage(quantize_onnx, old, digits)
    assert str(raised.value) == (
        "quant.onnx: the file has opset 9, and can't be converted to 13: export it with a later one: "
        "No Adapter From Version $9 for ThresholdedRelu"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [old.path]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "dynamic", "num_samples": 10},
        {"mode": "dynamic", "calibrate_method": "entropy"},
        {"percentile": 99.0},
        {"activation_type": "int8", "weight_type": "uint8"},
        {"num_samples": 1},
        {"compare_samples": 1},
        {"calibrate_method": "mse"},
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        QuantizeOnnxConfig.model_validate(options)


def test_options_are_explained() -> None:
    assert all(field.description for field in QuantizeOnnxConfig.model_fields.values())
    assert sys.modules["ptpipe_onnx"].quantize_onnx.help
