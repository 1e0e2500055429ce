"""What comparisons add to reports: the same samples that the numbers are of, for every kind of task."""

from __future__ import annotations

import dataclasses
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from ptpipe import Outcome, RunFinished, StageError, StageFinished
from ptpipe.sections import DotPlot, HeatMap, ImageGrid, Plot, Table, Text, Topic
from ptpipe_eval import Comparison, Latency, Row, StartUp, eval_compare, eval_predict, gate_size
from ptpipe_eval.quality.curves import curves_of
from ptpipe_eval.quality.details import Details, ModelDetails
from ptpipe_eval.quality.paired import pair
from ptpipe_eval.quality.recorder import SampleRecorder
from ptpipe_eval.report import Compared, report_sections
from ptpipe_eval.report.latency import latency_section
from ptpipe_eval.report.quality import quality_section
from ptpipe_eval.report.samples import samples_section
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    MultiLabel,
    Predictions,
    RaggedColumn,
    Regression,
    Split,
    TokensInfo,
)
from ptpipe_torch.task.ranking import RANKED, rows_of_samples, with_ranking

from ....datasets import image_info, image_split

NAMES = ("zero", "one", "two")
NUM_SAMPLES = 60
LABELS_N = np.arange(NUM_SAMPLES) % 3
LOST = (4, 10, 7)
"""Samples that the second model has wrong, by how much its loss grows: most for the first."""


def latency(ratio: float, speed: str, length: int | None = None) -> Latency:
    bounds = (0.2, 0.4, ratio, ratio - 0.1, ratio + 0.1)
    return Latency(1, "one", 1, 0.3 * ratio, *bounds, speed, 0.02, 3, 100, 0.3, 0.0, 1,
                   length=length, round_ratios=(ratio, ratio + 0.01))  # fmt: skip


def compared(task, outputs, targets, rows=None) -> Compared:
    models = []
    for predicted in outputs:
        recorder = SampleRecorder(task, NUM_SAMPLES)
        recorder.add(predicted, targets)
        sums = {name: total.numpy() for name, total in task.sums(predicted, targets).items()}
        figures = with_ranking(
            task, task.figures(sums, NUM_SAMPLES), rows_of_samples(task, predicted, targets).get(RANKED)
        )
        figures |= curves_of(task, figures, rows_of_samples(task, predicted, targets).get(RANKED))
        models.append((recorder, figures))
    ids = [f"test/{number:05d}" for number in range(NUM_SAMPLES)]
    samples = pair(task, [recorder.result() for recorder, _ in models], 0, ids, seed=7)
    details = Details(tuple(recorder.details(figures) for recorder, figures in models), models[0][0].targets())
    named = [{metric.name: figures[metric.name] for metric in task.metrics} for _, figures in models]
    rows = rows or tuple(Row(name, "onnx", 100, of) for name, of in zip(("float", "int8"), named, strict=True))
    comparison = Comparison(
        "toy", "test", NUM_SAMPLES, task.metrics, "float", rows, "m", "t", samples=samples, details=details
    )
    return Compared("compare", comparison, comparison.summary(), "int8", "data", "output")


@pytest.fixture(scope="module")
def classified() -> Compared:
    logits_NK = 4 * torch.nn.functional.one_hot(torch.from_numpy(LABELS_N), 3).float()
    worse_NK = logits_NK.clone()
    for rank, position in enumerate(LOST):
        worse_NK[position, (LABELS_N[position] + 1) % 3] += 9 - 2 * rank
    targets = {"labels": torch.from_numpy(LABELS_N)}
    return compared(Classification(class_names=NAMES), [{"logits": logits_NK}, {"logits": worse_NK}], targets)


def finished(size_bytes: int = 1000) -> RunFinished:
    outputs = {"output": {"type": "ptpipe_torch.Data", "digest": "d", "size_bytes": size_bytes, "summary": {}}}
    data = StageFinished("data", "data.toy", Outcome.DONE, 1.0, "k", outputs=outputs)
    return RunFinished("run", "toy", None, 0, 1.0, (data,))


def test_confusion_matrices_and_their_difference_are_those_of_the_predictions(classified):
    section = quality_section(classified)
    assert (section.title, section.topic) == ("Where int8 differs from float", Topic.QUALITY)
    base, own, difference = (block for block in section.blocks if isinstance(block, HeatMap))
    assert base.values == ((20, 0, 0), (0, 20, 0), (0, 0, 20))
    assert own.values == ((20, 0, 0), (0, 17, 3), (0, 0, 20))
    assert difference.values == ((0, 0, 0), (0, -3, 3), (0, 0, 0))
    assert difference.is_difference and difference.is_confusion
    assert base.row_names == base.column_names == NAMES


def compared_rankings():
    logits_NK = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    worse_NK = logits_NK + torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(2))
    task = Classification(class_names=NAMES, positive_class="one")
    targets = {"labels": torch.from_numpy(LABELS_N)}
    return compared(task, [{"logits": logits_NK}, {"logits": worse_NK}], targets), worse_NK


def test_other_metrics_have_their_intervals():
    own, _ = compared_rankings()
    (table,) = [block for block in quality_section(own).blocks if isinstance(block, Table)]
    assert table.columns == ("metric", "float", "int8", "worse by")
    assert [row[0] for row in table.rows] == ["roc auc", "average precision", "accuracy", "loss"]
    base, worse = (row.metrics["roc_auc"] for row in own.comparison.rows)
    low, high = own.comparison.samples.drop("roc_auc", 1).limits(0.975)
    assert table.rows[0][1:] == (
        f"{100 * base:.2f} %",
        f"{100 * worse:.2f} %",
        f"{100 * round(base - worse, 12):.2f} [{100 * low:.2f}, {100 * high:.2f}] points",
    )
    assert "points" not in table.rows[3][3]


def test_curves_of_all_models_are_drawn_over_each_other():
    own, worse_NK = compared_rankings()
    roc, precision_recall = [block for block in quality_section(own).blocks if isinstance(block, Plot)]
    assert (roc.title, precision_recall.title) == ("ROC curve of one", "Precision-recall curve of one")
    for plot, metric in ((roc, "roc_auc"), (precision_recall, "average_precision")):
        values = [row.metrics[metric] for row in own.comparison.rows]
        names = [f"{name}: area {value:.4f}" for name, value in zip(("float", "int8"), values, strict=True)]
        assert [series.name for series in plot.series] == [*names, "as predicted"]
        x, y = np.array([(point.x, point.y) for point in plot.series[1].points]).T
        assert np.diff(x) @ (y[1:] + y[:-1]) / 2 == pytest.approx(values[1], abs=1e-4)
    predicted_N = worse_NK.argmax(1).numpy()
    recall = ((predicted_N == 1) & (LABELS_N == 1)).sum() / (LABELS_N == 1).sum()
    assert [series.points[1].y for series in roc.series[2:]] == pytest.approx([recall])
    assert [mark.value for mark in precision_recall.marks] == [pytest.approx(1 / 3)]


def test_of_many_labels_the_curves_that_fall_most_are_drawn():
    labels_NK = torch.zeros(NUM_SAMPLES, 5)
    labels_NK[torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES) % 5] = 1
    worse_NK = labels_NK.clone()
    worse_NK[:20, 3], worse_NK[:4, 1] = 9, 9
    task = MultiLabel(label_names=tuple("abcde"))
    own = compared(task, [{"logits": labels_NK}, {"logits": worse_NK}], {"labels": labels_NK})
    blocks = quality_section(own).blocks
    titles = [block.title for block in blocks if isinstance(block, Plot)]
    assert titles[:4:2] == ["ROC curve of d", "ROC curve of b"] and len(titles) == 6
    assert Text("Curves of 3 of 5 labels: those that lose most average precision.") in blocks


def test_a_comparison_that_was_stored_without_curves_has_none(classified):
    assert not [block for block in quality_section(classified).blocks if isinstance(block, Plot)]


def test_change_by_class_has_the_interval_the_right_way_round(classified):
    (plot,) = [block for block in quality_section(classified).blocks if isinstance(block, DotPlot) and block.marks]
    assert plot.names == ("one (20)",)
    (dot,) = plot.series[0].dots
    assert dot.value == pytest.approx(-15)
    assert dot.low < -15 < dot.high
    (row,) = [row for row in classified.summary["rows"] if row["name"] == "int8"]
    assert (dot.low, dot.high) == pytest.approx((-100 * row["per_class"][0]["high"], -100 * row["per_class"][0]["low"]))


def test_many_classes_have_a_table_of_the_pairs_that_changed():
    names = tuple(f"class {number}" for number in range(30))
    logits_NK = torch.nn.functional.one_hot(torch.from_numpy(LABELS_N), 30).float()
    worse_NK = logits_NK.clone()
    worse_NK[[0, 3], 29] = 5
    targets = {"labels": torch.from_numpy(LABELS_N)}
    own = compared(Classification(class_names=names), [{"logits": logits_NK}, {"logits": worse_NK}], targets)
    table, _ = [block for block in quality_section(own).blocks if isinstance(block, Table)]
    assert table.rows == (("class 0", "class 29", "+2"),)


def test_equal_predictions_are_said_to_be_equal(classified):
    logits = {"logits": torch.nn.functional.one_hot(torch.from_numpy(LABELS_N), 3).float()}
    own = compared(Classification(class_names=NAMES), [logits, logits], {"labels": torch.from_numpy(LABELS_N)})
    assert Text("int8 and float have the same confusion matrix.") in quality_section(own).blocks
    assert samples_section(own, finished(), None) is None


def test_a_regression_has_residuals_and_its_worst_samples():
    task = Regression(target_names=("age",), mean=(30.0,), std=(10.0,))
    targets_NT = torch.arange(float(NUM_SAMPLES))[:, None]
    base_NT = targets_NT + 1 + targets_NT % 3
    worse_NT = base_NT.clone()
    worse_NT[[5, 8]] += torch.tensor([[9.0], [4.0]])
    own = compared(task, [{"predictions": base_NT}, {"predictions": worse_NT}], {"targets": targets_NT})
    (plot,) = [block for block in quality_section(own).blocks if isinstance(block, Plot)]
    assert plot.x_label == "age"
    assert {point.y for point in plot.series[0].points} == {1.0, 2.0, 3.0}
    assert max(point.y for point in plot.series[1].points) == 12.0
    section = samples_section(own, finished(1 << 40), None)
    assert section.title == "The samples on which int8 loses most"
    assert section.blocks[0].rows == (
        ("test/00005", "5, predicted 17 (float: 8)"),
        ("test/00008", "8, predicted 15 (float: 11)"),
    )


@pytest.fixture
def data():
    """The samples of the comparison in another order, each a picture of its number."""
    order_N = np.roll(np.arange(NUM_SAMPLES), 5)
    pixels_NHWC = np.broadcast_to(order_N.astype(np.uint8)[:, None, None, None], (NUM_SAMPLES, 4, 4, 1))
    ids = np.array([f"test/{number:05d}" for number in order_N])
    split = image_split(ids, LABELS_N[order_N], ArrayColumn(np.ascontiguousarray(pixels_NHWC)))
    return Data(image_info("toy", NAMES, (1, 4, 4), (0.3,), (0.4,)), {"test": split})


def test_the_samples_that_are_lost_are_shown_worst_first(classified, data):
    section = samples_section(classified, finished(), lambda stage_id, output: data)
    assert (section.title, section.topic) == ("The 3 samples that float has right and int8 wrong", Topic.SAMPLES)
    (grid,) = section.blocks
    assert isinstance(grid, ImageGrid)
    assert [image.caption for image in grid.images] == [f"two, not one (test/{number:05d})" for number in LOST]
    assert [PILImage.open(io.BytesIO(image.png)).getpixel((0, 0)) for image in grid.images] == [*LOST]


def test_texts_are_shown_as_they_were_written(classified):
    tokenizers = pytest.importorskip("tokenizers", reason="needs ptpipe[text]")
    words = {"[PAD]": 0, "cheap": 1, "pills": 2, "hello": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    values_V = np.tile([1, 2, 3], NUM_SAMPLES)[: 2 * NUM_SAMPLES]
    column = RaggedColumn(values_V, np.arange(0, 2 * NUM_SAMPLES + 1, 2), 0)
    ids = np.array([f"test/{number:05d}" for number in range(NUM_SAMPLES)])
    split = Split(ids, {"tokens": column}, {"labels": ArrayColumn(LABELS_N)})
    info = DatasetInfo(
        "sms", {"tokens": TokensInfo(vocabulary_size=4, max_length=8)}, Classification(class_names=NAMES)
    )
    texts = Data(info, {"test": split}, assets={"tokenizer.json": tokenizer.to_str().encode()})
    (table,) = samples_section(classified, finished(), lambda stage_id, output: texts).blocks
    assert table.columns == ("sample", "result", "text")
    written = [[*words][token] for token in values_V]
    assert [row[2] for row in table.rows] == [" ".join(written[2 * number : 2 * number + 2]) for number in LOST]


def test_a_data_set_that_is_large_or_gone_leaves_the_ids(classified):
    def gone(stage_id, output):
        raise StageError("the folder is gone")

    def forbidden(stage_id, output):
        raise AssertionError("a large data set must not be read")

    rows = tuple((f"test/{number:05d}", "two, not one") for number in LOST)
    assert samples_section(classified, finished(1 << 40), forbidden).blocks == (Table(("sample", "result"), rows),)
    table, text = samples_section(classified, finished(), gone).blocks
    assert table.rows == rows
    assert "the folder is gone" in text.text


def timed(classified, speed="faster", length=None):
    rows = (
        Row("float", "torch", 200, {}, (latency(1.0, "baseline", length),), StartUp(1.0, 2.0, 3)),
        Row("other", "torch", 100, {}, (latency(0.7, speed, length),)),
        Row("int8", "onnx", 100, {}, (latency(0.5, speed, length),), StartUp(1.5, 2.5, 3)),
    )
    comparison = dataclasses.replace(classified.comparison, rows=rows, samples=None, details=None, metrics=())
    return dataclasses.replace(classified, comparison=comparison)


@pytest.mark.parametrize("length", [None, 64])
def test_latency_has_every_round_beside_the_noise(classified, length):
    section = latency_section(timed(classified, length=length))
    plot, table = section.blocks
    assert [series.name for series in plot.series] == ["int8", "other"], "the judged model first"
    assert [(point.x, point.y) for point in plot.series[0].points] == [(1.0, 0.5), (2.0, 0.51)]
    assert [(mark.value, mark.end) for mark in plot.marks] == [(1.0, None), (0.98, 1.02)]
    assert table.rows == (("float", 1.0, 2.0, 3), ("int8", 1.5, 2.5, 3))


def test_what_was_not_measured_has_no_section(classified):
    assert latency_section(classified) is None
    assert quality_section(timed(classified)) is None
    assert samples_section(timed(classified), finished(), None) is None
    without = dataclasses.replace(classified.comparison, details=Details((ModelDetails(), ModelDetails())))
    own = dataclasses.replace(classified, comparison=without, summary={})
    assert quality_section(own) is None
    assert len(samples_section(own, finished(1 << 40), None).blocks[0].rows) == 3, "in the order of the split"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"candidate": "other"}, "other"),
        ([{"candidate": "other", "decision": "passed"}, {"candidate": "int8", "decision": "undecided"}], "int8"),
        ([{"candidate": "other", "decision": "refused"}, {"candidate": "int8", "decision": "refused"}], "other"),
        ([{"candidate": "other", "decision": "undecided"}, {"candidate": "int8", "decision": "refused"}], "int8"),
        ({"selected": "other", "candidates": [{"candidate": "int8", "decision": "passed"}]}, "other"),
        ({"selected": "float", "candidates": [{"candidate": "int8", "decision": "passed"}]}, "int8"),
        ({"candidates": [{"candidate": "other", "decision": "passed"}, {"candidate": "int8", "decision": "refused"}]},
         "int8"),
        ({"candidates": [{"candidate": "other", "decision": "passed"}, {"candidate": "int8", "decision": "passed"}]},
         "other"),
    ],
)  # fmt: skip
def test_the_judged_model_is_the_one_that_sections_are_about(classified, facts, expected):
    comparison = timed(classified).comparison
    compare = StageFinished("compare", "eval.compare", Outcome.DONE, 1.0, "k", outputs={"output": {"summary": {}}})
    gates = [
        StageFinished(f"gate {number}", "gate.size", Outcome.DONE, 1.0, "g", outputs={"output": {"summary": of}})
        for number, of in enumerate(facts if isinstance(facts, list) else [facts])
    ]
    run = RunFinished("run", "toy", None, 0, 1.0, (compare, *gates))
    planned = {
        "compare": SimpleNamespace(stage=eval_compare, wiring={}, upstream=frozenset()),
        **{gate.stage_id: SimpleNamespace(stage=gate_size, upstream=frozenset({"compare"})) for gate in gates},
    }
    sections = list(report_sections(planned, run, lambda stage_id, output: comparison))
    plots = [block for section in sections for block in section.blocks if isinstance(block, Plot)]
    assert plots[0].series[0].name == expected, "the judged model first"


def test_without_a_comparison_an_evaluated_model_has_its_own_confusion(classified):
    tables = {"class_names": [*NAMES], "confusion": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "accuracy": 0.5}
    tables["per_class"] = [{"name": name, "f1": 0.5} for name in NAMES]
    predictions = Predictions(np.array(["a", "b"]), {}, tables)
    outputs = {"output": {"type": "ptpipe_torch.Predictions", "digest": "d", "size_bytes": 10, "summary": {}}}
    stage = StageFinished("examined", "eval.predict", Outcome.CACHED, 1.0, "k", outputs=outputs)
    run = RunFinished("run", "toy", None, 0, 1.0, (stage,))
    plan = {"examined": SimpleNamespace(stage=eval_predict)}
    (section,) = report_sections(plan, run, lambda stage_id, output: predictions)
    heat_map, plot = section.blocks
    assert (section.title, heat_map.title) == ("What examined gets wrong", "Confusion of examined")
    assert heat_map.values == ((1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert [dot.value for dot in plot.series[0].dots] == [0.5] * 3
    large = dataclasses.replace(stage, outputs={"output": {**outputs["output"], "size_bytes": 1 << 30}})
    assert list(report_sections(plan, dataclasses.replace(run, stages=(large,)), None)) == []
