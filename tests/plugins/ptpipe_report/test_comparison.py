from __future__ import annotations

from copy import deepcopy

import pytest

from ptpipe import Outcome
from ptpipe.events import StageFinished
from ptpipe_report.comparison import tables


def compared(summary: object, type_name: str = "Comparison") -> StageFinished:
    made = {"output": {"type": type_name, "digest": "d", "size_bytes": 1, "summary": summary}}
    return StageFinished("compare", "eval.compare", Outcome.DONE, 1.0, "k", outputs=made)


@pytest.mark.parametrize("type_name", ["Comparison", "ptpipe_eval.Comparison", "ptpipe_eval.comparison:Comparison"])
def test_the_table_is_found_by_its_class_name(comparison, type_name) -> None:
    (table,) = tables([compared(comparison, type_name)])
    assert [column.label for column in table.columns] == [
        "name",
        "format",
        "size",
        "size ratio",
        "accuracy",
        "drop",
        "batch 1, 1 thread",
        "batch 1, all threads",
        "batch 32, 1 thread",
    ]
    assert table.baseline == "pretrain" and table.is_baseline == (True, False, False)
    assert table.facts["num_samples"] == 10_000 and "rows" not in table.facts


def test_cells_are_medians_and_shares_and_points(comparison) -> None:
    (table,) = tables([compared(comparison)])
    texts = {column.label: column.texts for column in table.columns}
    assert texts["size"] == ("1.69 MB", "434 kB", "439 kB")
    assert texts["accuracy"] == ("99.13 %", "99.28 %", "98.83 %")
    assert texts["drop"] == ("0.00", "-0.15", "0.30")
    assert texts["batch 1, 1 thread"] == ("0.312", "0.139", "0.041")
    assert texts["batch 32, 1 thread"] == ("9.98", "4.45", "1.32")


def test_the_artifact_of_eval_compare_is_read() -> None:
    from ptpipe_eval import Comparison, Row
    from ptpipe_torch import Metric

    from ...latencies import latency

    metrics = (Metric("accuracy", higher_is_better=True, is_fraction=True), Metric("loss", higher_is_better=False))
    cell = latency(8, 2.5)
    rows = (
        Row("net", "torch float32", 2000, {"accuracy": 0.9, "loss": 0.1}, (cell,)),
        Row("onnx", "onnx int8", 500, {"accuracy": 0.89, "loss": 0.2}),
    )
    made = Comparison("digits", "test", 100, metrics, "net", rows, "medians", "2026-07-01T12:00:00+00:00")
    (table,) = tables([compared(made.summary(), Comparison.__name__)])
    texts = {column.label: column.texts for column in table.columns}
    assert texts == {
        "name": ("net", "onnx"),
        "format": ("torch float32", "onnx int8"),
        "size": ("2.00 kB", "500 B"),
        "size ratio": ("100.0 %", "25.0 %"),
        "accuracy": ("90.00 %", "89.00 %"),
        "drop": ("0.00", "1.00"),
        "batch 8, 1 thread": ("2.50", "-"),
    }


def test_a_metric_that_is_no_fraction_is_shown_as_it_is() -> None:
    from ptpipe_eval import Comparison, Row
    from ptpipe_torch import Metric

    rows = (Row("net", "torch float32", 2000, {"mae": 2.5}), Row("onnx", "onnx int8", 500, {"mae": 2.75}))
    metrics = (Metric("mae", higher_is_better=False),)
    made = Comparison("ages", "test", 100, metrics, "net", rows, "medians", "2026-07-01T12:00:00+00:00")
    (table,) = tables([compared(made.summary(), Comparison.__name__)])
    texts = {column.label: column.texts for column in table.columns}
    assert (texts["mae"], texts["worse by"]) == (("2.50", "2.75"), ("0", "0.250"))


def test_an_interval_stands_beside_its_value(comparison) -> None:
    rows = [
        {"name": "net", "drop": 0.0, "loss": 1.0, "worse_by": 0.0},
        {"name": "int8", "drop": 0.0012, "drop_low": -0.0003, "drop_high": 0.0027, "loss": 1.5, "very_low": 3.0},
    ]
    (table,) = tables([compared({"baseline": "net", "rows": rows})])
    texts = {column.label: column.texts for column in table.columns}
    assert texts["drop"] == ("0.00", "0.12 [-0.03, 0.27]")
    assert texts["very low"] == ("-", "3.00")  # a bound of nothing
    assert texts.keys() == {"name", "drop", "loss", "worse by", "very low"}
    assert not any(column.is_text for column in table.columns[1:])


def test_unknown_columns_are_shown(comparison) -> None:
    later = deepcopy(comparison)
    later["rows"][1] |= {"energy_ms": 3.0, "p_value": 0.04, "notes": {"nested": 1}}
    (table,) = tables([compared(later)])
    texts = {column.label: column.texts for column in table.columns}
    assert texts["p value"] == ("-", "0.0400", "-")
    assert "notes" not in texts


@pytest.mark.parametrize(
    "summary",
    [None, {}, [], "text", {"rows": None}, {"rows": []}, {"rows": [1, "x"]}, {"rows": {"a": 1}}, {"rows": [{}]}],
)
def test_a_summary_without_rows_is_no_table(summary) -> None:
    assert not list(tables([compared(summary)]))


def test_latencies_in_another_shape_are_left_out(comparison) -> None:
    odd = {"rows": [{"name": "net", "latency": [1, {"p50": 2}, {"median_ms": 3.0}]}]}
    (table,) = tables([compared(odd)])
    assert [(column.label, column.values) for column in table.columns] == [("name", ("net",)), ("latency", (3.0,))]


def test_no_comparison_no_table(script) -> None:
    assert not list(tables([script.stage("net", "model.mlp")]))
    assert not list(tables([compared({"rows": [{"name": "x"}]}, "Verdict")]))
