"""Which nodes rounding harms. Shape legend: N samples, C channels, K classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from ptpipe import Context
from ptpipe.events import Notice
from ptpipe_onnx import quantize_onnx
from ptpipe_onnx.quantization.agreement import join_rows
from ptpipe_onnx.quantization.preparation import load_preprocessed
from ptpipe_onnx.quantization.rounding_effects import _SwitchedFile, is_poor
from ptpipe_torch import DatasetInfo, OnnxFile, TokenClassification, TokensInfo, Unlabeled

from ..conftest import RecordedEvents
from .test_post_training import Run, fixed_batch_file, images_of, logits


def with_offset(path: Path, file: OnnxFile, offset: float) -> OnnxFile:
    """Add a number to the logits and subtract it again, which floats don't mind."""
    content = onnx.load(file.path)
    graph = content.graph
    (last,) = (node for node in graph.node if "logits" in node.output)
    last.output[0] = "own"
    for name, source, result, value in (("up", "own", "high", offset), ("down", "high", "logits", -offset)):
        graph.initializer.append(numpy_helper.from_array(np.float32([value]), name))
        graph.node.append(helper.make_node("Add", [source, name], [result], f"{name}_node"))
    onnx.save_model(content, path)
    return OnnxFile(path, file.signature)


def notices(events: RecordedEvents) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def test_the_node_that_harms_is_named_and_skipping_it_helps(
    float_file, digits, run_stage: Run, events: RecordedEvents, tmp_path
) -> None:
    harmed = with_offset(tmp_path / "harmed.onnx", float_file, 3000.0)
    file = run_stage(quantize_onnx, harmed, digits)
    assert file.parity["top1_agreement"] < 0.9
    (notice,) = notices(events)
    assert notice.startswith("outputs lose most where these alone are rounded: up_node (")
    assert "`skip: [up_node, down_node]` keeps them float: " in notice and notice.endswith("agreement on 128 samples")
    assert events.metrics["suggested_skip"] == ["up_node", "down_node"]  # behind the last layer: not any Add
    alone = dict(events.metrics["sqnr_db_alone"])
    assert alone.pop("up_node") < 10 and alone.pop("down_node") < 10 and min(alone.values()) > 20
    mended = run_stage(quantize_onnx, harmed, digits, skip=["up_node", "down_node"])
    assert mended.parity["top1_agreement"] >= 0.98 and notices(events) == []


def test_a_file_of_one_batch_size(float_file, digits, run_stage: Run, events: RecordedEvents, tmp_path) -> None:
    fixed = fixed_batch_file(tmp_path / "fixed.onnx", with_offset(tmp_path / "harmed.onnx", float_file, 3000.0), 7)
    run_stage(quantize_onnx, fixed, digits)
    (notice,) = notices(events)
    assert "`skip: [Add_2, Add_3]`" in notice and notice.endswith(f"on {128 // 7 * 7} samples")


@pytest.mark.parametrize("options", [{"mode": "dynamic"}, {"format": "qoperator"}])
def test_other_ways_name_no_nodes(options, float_file, digits, run_stage: Run, events, tmp_path) -> None:
    file = run_stage(quantize_onnx, with_offset(tmp_path / "harmed.onnx", float_file, 3000.0), digits, **options)
    poor = "outputs are far from the float file's (64.7 % agreement); no few nodes are known to cause that"
    assert notices(events) == ([poor] if file.parity["top1_agreement"] < 0.9 else [])
    assert "suggested_skip" not in events.metrics


@pytest.fixture
def switched(float_file, digits, run_stage: Run, tmp_path) -> Callable[..., tuple[_SwitchedFile, ModelProto]]:
    def make(**options: object) -> tuple[_SwitchedFile, OnnxFile]:
        quantized = run_stage(quantize_onnx, float_file, digits, reduce_range=False, optimize=False, **options)
        content = load_preprocessed(Context("a", "quant.onnx", 7, tmp_path), float_file)
        return _SwitchedFile(content, onnx.load(quantized.path), []), quantized

    return make


def test_nothing_rounded_is_the_float_file_and_all_of_it_the_int8_one(switched, float_file, digits) -> None:
    """Activations are part of layers in the int8 file: without its own rounding, it would lack them."""
    both, quantized = switched()
    images = images_of(digits)
    nothing, everything = (both.run({"images": images}, groups)["logits"] for groups in ([], both.groups))
    np.testing.assert_allclose(nothing, logits(float_file, images), rtol=1e-4, atol=1e-4)
    expected = logits(quantized.with_exact_sums(), images)
    assert np.abs(everything - expected).mean() < 0.05 * np.abs(expected - nothing).mean()
    assert {"0.0", "5", "7"} & set(both.groups) and "Relu" not in both.groups


def test_a_tensor_is_rounded_where_any_group_wants_it(switched, digits) -> None:
    both, _ = switched()
    images = images_of(digits)
    outputs = [both.run({"images": images}, [group])["logits"] for group in both.groups]
    nothing = both.run({"images": images}, [])["logits"]
    assert all(np.abs(output - nothing).max() > 0 for output in outputs)


@pytest.mark.parametrize(
    ("figures", "poor"),
    [
        ({"top1_agreement": 0.995, "sqnr_db": 3.0}, False),
        ({"a.top1_agreement": 0.995, "b.top1_agreement": 0.98, "a.sqnr_db": 25.0}, True),
        ({"top1_agreement": 0.95, "sqnr_db": 35.0}, False),
        ({"sqnr_db": 20.5}, False),
        ({"a.sqnr_db": 40.0, "b.sqnr_db": 19.0}, True),
        ({"sqnr_db": float("nan")}, True),
        ({}, False),
    ],
)
def test_poor_outputs(figures, poor) -> None:
    assert is_poor(figures) is poor


BOXES_AND_SCORES = np.concatenate(
    [np.random.default_rng(1).uniform(0, 300, (6, 4, 50)), np.random.default_rng(2).random((6, 12, 50))], axis=1
).astype(np.float32)


def paired(float_output: np.ndarray, rounded: np.ndarray) -> dict[str, object]:
    halves = [({}, {"y": float_output[rows]}, {"y": rounded[rows]}) for rows in (slice(0, 2), slice(2, None))]
    return join_rows(DatasetInfo("x", {}, Unlabeled()), ["y"], halves)["y"].figures


def test_classes_of_padding_are_no_predictions() -> None:
    info = DatasetInfo(
        "texts",
        {"tokens": TokensInfo(vocabulary_size=9, max_length=4)},
        TokenClassification(class_names=("a", "b")),
    )
    scores = np.float32([[[2, 1], [1, 2], [1, 2], [1, 2]]])
    batches = [
        ({"tokens": np.array([[5, 6, 0, 0]])}, {"logits": scores}, {"logits": scores * [[[1], [1], [-1], [-1]]]})
    ]
    pair = join_rows(info, ["logits"], batches)["logits"]
    assert pair.is_counted_N is not None and pair.is_counted_N.tolist() == [True, True, False, False]
    figures = pair.figures
    assert figures["top1_agreement"] == 1 and "sqnr_db" not in figures
    assert figures["max_abs_logit_difference"] == 4, "as in Parity, of all rows"


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1)])
def test_scores_lost_beside_boxes_are_seen(axes) -> None:
    """Of an output with one scale for all: 12 of 16 channels are 0 now, which their power alone doesn't show."""
    rounded = np.round(BOXES_AND_SCORES / 2) * 2
    figures = paired(BOXES_AND_SCORES.transpose(axes), rounded.transpose(axes))
    assert figures["sqnr_db"] > 40 and figures["channel_sqnr_db"] == pytest.approx(10 * np.log10(16 / 12), abs=0.05)
    assert is_poor(figures)
    noise = np.random.default_rng(3).normal(0, 0.01, BOXES_AND_SCORES.shape).astype(np.float32)
    assert not is_poor(paired(BOXES_AND_SCORES, BOXES_AND_SCORES + noise))


def test_columns_of_a_sample_are_no_channels() -> None:
    assert "channel_sqnr_db" not in paired(BOXES_AND_SCORES[..., 0], BOXES_AND_SCORES[..., 0] + 1)
