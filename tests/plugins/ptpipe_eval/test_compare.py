from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ptpipe import Context, IntegrityError, StageError, host
from ptpipe.events import Metric, Notice, Progress
from ptpipe_eval import Comparison, Row, StartUp, eval_compare, eval_latency, eval_predict
from ptpipe_eval.compare import describe_disturbance, describe_slower_int8
from ptpipe_eval.config import CompareConfig, EvalLatencyConfig, PredictConfig
from ptpipe_eval.graph.facts import Costs, Peaks
from ptpipe_eval.quality import recorder
from ptpipe_torch import Classification, OnnxFile, Selected
from ptpipe_torch import Metric as TaskMetric

from ...latencies import latency

QUICK = {"batch_sizes": ()}
"""Latency is another test's."""
ACCURACY = TaskMetric("accuracy", higher_is_better=True, is_fraction=True)
LOSS = TaskMetric("loss", higher_is_better=False)


@pytest.fixture
def table() -> Comparison:
    cells = (latency(1, 0.11), latency(32, 1.25, threads="all", num_threads=2, p99_ms=1.5))
    rows = (
        Row("net", "torch float32", 1000, {"accuracy": 0.99, "loss": 0.25}, cells, StartUp(10.5, 0.2, 3000)),
        Row("tiny", "onnx int8", 250, {"accuracy": 0.995, "loss": 0.5}, costs=Costs(200, {"int8": 240}, 640)),
    )
    metrics = (ACCURACY, LOSS)
    peaks = (Peaks(1, {"int8": 2e9}, {"1000": 1e9}),)
    measured_at = "2026-01-02T03:04:05+00:00"
    return Comparison("digits", "test", 200, metrics, "net", rows, "by stopwatch", measured_at, peaks=peaks)


def test_rows_hold_what_was_measured(digits, pair, torch_model, onnx_model, context) -> None:
    models = [*pair, torch_model, onnx_model]
    ctx = context(models=("net", "worse", "torch", "onnx"))
    made = eval_compare(CompareConfig(**QUICK), ctx, models, digits)

    assert [row.name for row in made.rows] == ["net", "worse", "torch", "onnx"]
    assert [row.format for row in made.rows] == ["numpy float32"] * 2 + ["torch float32", "onnx float32"]
    assert [row.size_bytes for row in made.rows] == [model.size_bytes for model in models]
    for row, model in zip(made.rows, models, strict=True):
        alone = eval_predict(PredictConfig(), context(), model, digits)
        assert row.metrics == {name: alone.metrics[name] for name in ("accuracy", "top5_accuracy", "loss")}
    assert made.metrics == digits.info.task.metrics
    assert (made.data, made.split, made.num_samples, made.baseline) == ("digits", "test", 400, "net")
    assert abs(datetime.now(UTC) - datetime.fromisoformat(made.measured_at)).total_seconds() < 60


@pytest.mark.parametrize("is_selected", [False, True])
def test_quality_is_that_of_the_processors_a_file_is_for(
    digits, torch_model, onnx_model, weights, context, events, monkeypatch, tmp_path, is_selected
) -> None:
    content = onnx.load(onnx_model.path)
    biases = next(tensor for tensor in content.graph.initializer if tensor.name == "biases")
    biases.CopyFrom(numpy_helper.from_array(weights[1] - 100 * (np.arange(10) == 3).astype(np.float32), "biases"))
    onnx.save(content, tmp_path / "saturating.onnx")
    file = OnnxFile(tmp_path / "saturating.onnx", onnx_model.signature)
    monkeypatch.setattr(OnnxFile, "as_on_target", lambda self: onnx_model if self is file else self)
    models = [torch_model, Selected("file", file) if is_selected else file]
    made = eval_compare(CompareConfig(**QUICK), context(models=("net", "int8")), models, digits)
    alone = eval_predict(PredictConfig(), context(model=("int8",)), models[1], digits)
    assert made.rows[1].metrics["accuracy"] == alone.metrics["accuracy"] == made.rows[0].metrics["accuracy"] > 0.9
    compared, predicted = (event.text for event in events if isinstance(event, Notice))
    assert compared == predicted
    assert re.search(r"int8 was made for qnnpack.* accuracy 9\d\.\d\d %\. .* accuracy 8\d\.\d\d %\.", compared)


@pytest.mark.usefixtures("forked_servers")
def test_every_cell_is_timed(digits, pair, context, events) -> None:
    options = {"batch_sizes": (1, 5), "budget_s": 0.5, "split": "val"}
    compared, timed = (
        stage(config(**options), context(models=("a", "b")), pair, digits)
        for stage, config in ((eval_compare, CompareConfig), (eval_latency, EvalLatencyConfig))
    )
    for row in (*compared.rows, *timed.rows):
        assert [(cell.batch_size, cell.threads, cell.num_threads) for cell in row.latencies] == [
            (1, "one", 1),
            (5, "one", 1),
            (1, "all", host.num_threads()),
            (5, "all", host.num_threads()),
        ]
        assert row.start_up.load_ms > 0
    assert [row.metrics.keys() for row in timed.rows] == [set(), set()]
    assert [row.size_bytes for row in timed.rows] == [row.size_bytes for row in compared.rows]
    assert (timed.metrics, timed.split, timed.baseline) == ((), "val", "a")
    assert any(event.unit == "s" for event in events if isinstance(event, Progress))


def test_a_comparison_of_latency_alone_is_saved_and_has_no_metric(table, tmp_path) -> None:
    rows = tuple(replace(row, metrics={}) for row in table.rows)
    timed = replace(table, metrics=(), rows=rows)
    timed.save(tmp_path)
    assert Comparison.load(tmp_path) == timed
    assert "drop" not in timed.summary()["rows"][1]
    with pytest.raises(StageError, match=r"^the comparison has no accuracy, but latency and size alone$"):
        timed.metric("accuracy")
    with pytest.raises(StageError, match=r"^the comparison has no metric, but latency and size alone$"):
        timed.metric(None)


def test_baseline_is_the_first_or_the_one_named(digits, pair, context) -> None:
    ctx = context(models=("a", "b"))
    first = eval_compare(CompareConfig(**QUICK), ctx, pair, digits)
    named = eval_compare(CompareConfig(baseline="b", **QUICK), ctx, pair, digits)
    assert (first.baseline, named.baseline) == ("a", "b")
    a, b = (row.metrics["accuracy"] for row in first.rows)
    assert 0.05 < a - b < 0.15
    assert [row["drop"] for row in first.summary()["rows"]] == pytest.approx([0, a - b])
    assert [row["drop"] for row in named.summary()["rows"]] == pytest.approx([b - a, 0])


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("net", "int8"), {"baseline": "nett"}, r"baseline 'nett' is not among the models: net, int8 .*mean 'net'\?"),
        (("net", "net"), {}, "models lists net more than once"),
    ],
)
def test_bad_model_names_are_errors(digits, pair, context, names, options, message) -> None:
    with pytest.raises(StageError, match=message):
        eval_compare(CompareConfig(**options), context(models=names), pair, digits)


def test_misfits_are_found_before_anything_is_measured(digits, linear_model, weights, context) -> None:
    good, wide = linear_model(*weights), linear_model(*weights, shape_CHW=(1, 4, 16))
    with pytest.raises(StageError, match=r"wide takes images \(batch, 1, 4, 16\)"):
        eval_compare(CompareConfig(), context(models=("good", "wide")), [good, wide], digits)
    few = linear_model(weights[0][:4], weights[1][:4])
    with pytest.raises(StageError, match=r"few returns logits \(batch, 4\)"):
        eval_compare(CompareConfig(), context(models=("good", "few")), [good, few], digits)
    assert good.opened_with == []
    with pytest.raises(StageError, match=r"wide takes images"):
        eval_latency(EvalLatencyConfig(), context(models=("good", "wide")), [good, wide], digits)


def test_a_model_with_nan_logits_is_named(digits, linear_model, weights, context) -> None:
    broken = linear_model(weights[0], np.full(10, np.nan, np.float32))
    with pytest.raises(StageError, match="broken: the logits of sample test/00000 are not finite"):
        eval_compare(CompareConfig(), context(models=("broken",)), [broken], digits)


def test_progress_and_metrics_are_reported(digits, pair, context, events) -> None:
    made = eval_compare(CompareConfig(**QUICK), context(models=("a", "b")), pair, digits)
    steps = [event for event in events if isinstance(event, Progress)]
    *steps, last = steps
    assert last.facts == {"doing": "computing intervals"}
    assert [(step.done, step.total, step.facts["model"]) for step in steps][-1] == (800, 800, "b")
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    metrics = {event.name: event.value for event in events if isinstance(event, Metric)}
    assert metrics == {f"{row.name}.accuracy": row.metrics["accuracy"] for row in made.rows}


def test_what_can_not_be_measured_is_reported(table) -> None:
    assert describe_disturbance(table.rows) is None
    unknown = replace(table.rows[0].latencies[1], speed="unmeasurable")
    assert describe_disturbance([replace(table.rows[1], latencies=(unknown,))] * 2) == (
        "latency at batch 32, all threads: other programs used the processors, or the budget was too short for 3 "
        "starts of every model, so no model can be called faster than another"
    )


def _rows(*models: tuple[str, str, float, float]) -> list[Row]:
    """Return a row for each name, format, and ratio to the baseline with one image and with 32."""
    return [
        Row(name, format_, 1, {}, (latency(1, 1, one), latency(32, 1, many))) for name, format_, one, many in models
    ]


@pytest.mark.parametrize(("flags", "why"), [({"avx2"}, ", which has no VNNI"), ({"avx_vnni"}, ""), (None, "")])
def test_int8_that_is_slower_than_float_is_named(monkeypatch, flags, why) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    rows = _rows(
        ("net", "torch float32", 1, 1),
        ("torch_int8", "torch int8 fbgemm", 1.5, 1.5),  # the table says it
        ("float", "onnx float32", 0.4, 0.5),
        ("static", "onnx int8", 0.5, 0.7),
        ("dynamic", "onnx int8 dynamic", 0.3, 0.6),
        ("same", "onnx int8", 0.41, 0.51),
        ("openvino", "openvino int8", 0.9, 0.9),
    )
    assert describe_slower_int8(rows, rows[0]) == (
        f"int8 is slower than float on this machine{why}: "
        "static takes 1.40x the time of float (batch 32, one thread); "
        "dynamic takes 1.20x the time of float (batch 32, one thread)"
    )


def test_no_model_is_called_slower_without_certainty() -> None:
    rows = _rows(("net", "torch float32", 1, 1), ("float", "onnx float32", 0.4, 0.5), ("int8", "onnx int8", 0.6, 0.4))
    assert describe_slower_int8(rows, rows[0]) is not None
    assert describe_slower_int8(rows, rows[1]) is None
    assert describe_slower_int8([*rows, replace(rows[1], name="of another network")], rows[0]) is None
    cells = ({"ratio_low": 0.3, "ratio_high": 0.9}, {"ratio_low": None, "ratio_high": None}, {"noise": 0.6})
    for fields in cells:
        unsure = replace(rows[2], latencies=(latency(1, 1, 0.6, **fields), rows[2].latencies[1]))
        assert describe_slower_int8([*rows[:2], unsure], rows[0]) is None


def test_a_comparison_is_saved_and_loaded(digits, pair, context, tmp_path) -> None:
    made = eval_compare(CompareConfig(baseline="b", **QUICK), context(models=("a", "b")), pair, digits)
    (tmp_path / "kept").mkdir()
    made.save(tmp_path / "kept")
    assert Comparison.load(tmp_path / "kept") == made
    assert json.loads((tmp_path / "kept" / "comparison.json").read_text()) == made.summary()


def test_models_are_compared_sample_by_sample(digits, pair, context, tmp_path) -> None:
    ctx = context(models=("b", "a"))
    made = eval_compare(CompareConfig(baseline="a", **QUICK), ctx, pair[::-1], digits)
    alone = [eval_predict(PredictConfig(), context(), model, digits).arrays for model in pair]
    is_lost_N, is_gained_N = (alone[i]["score"].astype(bool) & ~alone[1 - i]["score"].astype(bool) for i in range(2))
    (row, of_baseline) = made.summary()["rows"]
    accuracy = row["paired"]["accuracy"]
    assert (accuracy["num_lost"], accuracy["num_gained"]) == (is_lost_N.sum(), is_gained_N.sum())
    assert accuracy["drop"] == row["drop"] == made.drop("b", ACCURACY).drop > 0.05
    assert row["drop_low"] < row["drop"] < row["drop_high"]
    assert row["num_flips"] == (alone[0]["prediction"] != alone[1]["prediction"]).sum() >= is_lost_N.sum()
    assert row["paired"]["loss"]["low"] < row["metrics"]["loss"] - of_baseline["metrics"]["loss"]
    assert row["per_class"][0]["name"] == "three"  # which it never says
    assert row["per_class"][0]["drop"] == pytest.approx(1, abs=0.1)
    assert "paired" not in of_baseline and of_baseline["drop"] == 0

    made.save(tmp_path)
    loaded = Comparison.load(tmp_path)
    assert loaded.samples.ids == tuple(digits.splits["test"].ids.tolist())
    assert loaded.summary() == made.summary()
    content = json.loads((tmp_path / "comparison.json").read_text())
    (tmp_path / "comparison.json").write_text(json.dumps(content | {"num_samples": 399}))
    with pytest.raises(IntegrityError, match="400 samples of a comparison of 399"):
        Comparison.load(tmp_path)


@pytest.mark.parametrize(
    ("names", "notice"),
    [
        (("net", "dumb"), "dumb is no better than always answering the most frequent class: accuracy 10.50 %"),
        (("dumb", "dumber"), "no model is better than always answering the most frequent class: accuracy 10.50 %"),
    ],
)
def test_models_that_learned_nothing_are_named(
    digits, linear_model, weights, context, events, tmp_path, names, notice
) -> None:
    three = 100 * (np.arange(10) == 3).astype(np.float32)  # the most frequent class is three
    models = {
        "net": linear_model(*weights),
        "dumb": linear_model(0 * weights[0], three),
        "dumber": linear_model(0 * weights[0], np.roll(three, 1)),
    }
    made = eval_compare(CompareConfig(**QUICK), context(models=names), [models[name] for name in names], digits)
    no_better = [name for name in names if name != "net"]
    assert made.summary()["trivial_answer"] == {
        "answer": "the most frequent class",
        "value": 42 / 400,
        "no_better": no_better,
    }
    assert [event.text for event in events if isinstance(event, Notice)] == [notice]
    made.save(tmp_path)
    assert Comparison.load(tmp_path) == made


def test_the_resamples_are_those_of_the_seed(digits, pair, context) -> None:
    tables = [
        eval_compare(CompareConfig(batch_sizes=()), replace(context(models=("a", "b")), seed=seed), pair, digits)
        for seed in (7, 7, 8)
    ]
    first, same, other = (table.drop("b", LOSS).limits(0.95) for table in tables)
    assert first == same != other == pytest.approx(first, rel=0.2)


def test_metrics_that_take_too_much_memory_are_reported(digits, pair, context, events, monkeypatch) -> None:
    monkeypatch.setattr(recorder, "_MAX_BYTES", 0)
    made = eval_compare(CompareConfig(batch_sizes=()), context(models=("a", "b")), pair, digits)
    assert made.drop("b", LOSS) is None and made.drop("b", ACCURACY).num_lost > 0
    assert [event.text for event in events if isinstance(event, Notice)] == [
        "no interval for loss: it takes too much memory, some draws of the samples have none, or these samples "
        "can't show one"
    ]


def test_what_a_split_lacks_for_a_metric_is_reported_once(digits, pair, context, events, monkeypatch) -> None:
    monkeypatch.setattr(Classification, "undefined", lambda _, figures, split: [f"{split}: {figures['accuracy']:.0f}"])
    eval_compare(CompareConfig(batch_sizes=()), context(models=("a", "b")), pair, digits)
    assert [event.text for event in events if isinstance(event, Notice)] == ["test: 1"]


def test_the_summary_is_as_documented(table) -> None:
    assert table.summary() == {
        "data": "digits",
        "split": "test",
        "num_samples": 200,
        "metrics": [
            {"name": "accuracy", "higher_is_better": True, "is_fraction": True},
            {"name": "loss", "higher_is_better": False, "is_fraction": False},
        ],
        "baseline": "net",
        "method": "by stopwatch",
        "measured_at": "2026-01-02T03:04:05+00:00",
        "rows": [
            {
                "name": "net",
                "format": "torch float32",
                "size_bytes": 1000,
                "size_ratio": 1.0,
                "accuracy": 0.99,
                "drop": 0.0,
                "metrics": {"accuracy": 0.99, "loss": 0.25},
                "latency": [
                    {
                        "batch_size": 1,
                        "threads": "one",
                        "num_threads": 1,
                        "median_ms": 0.11,
                        "low_ms": 0.11 * 0.98,
                        "high_ms": 0.11 * 1.02,
                        "ratio": 1.0,
                        "ratio_low": 0.98,
                        "ratio_high": 1.02,
                        "speed": "baseline",
                        "noise": 0.01,
                        "num_starts": 5,
                        "num_runs": 400,
                        "cpu_ms": 0.11,
                        "waited_fraction": 0.0,
                        "num_disturbed": 0,
                        "p10_ms": None,
                        "p90_ms": None,
                        "p99_ms": None,
                        "round_ratios": [1.0, 1.0],
                        "length": None,
                        "limit_ms": None,
                        "limited_by": None,
                        "bound_ms": None,
                        "peak_fraction": None,
                    },
                    table.summary()["rows"][0]["latency"][1],
                ],
                "start_up": {"load_ms": 10.5, "first_call_ms": 0.2, "peak_memory_bytes": 3000},
            },
            {
                "name": "tiny",
                "format": "onnx int8",
                "size_bytes": 250,
                "size_ratio": 0.25,
                "accuracy": 0.995,
                "drop": -0.005,
                "metrics": {"accuracy": 0.995, "loss": 0.5},
                "latency": [],
                "start_up": {},
                "compressed_bytes": 200,
                "macs": 640,
                "costs": table.rows[1].costs.to_json(),
            },
        ],
        "peaks": [{"num_threads": 1, "macs_per_s": {"int8": 2e9}, "bytes_per_s": {"1000": 1e9}}],
    }


def test_a_primary_metric_that_is_no_fraction_has_no_drop_in_points(table, tmp_path) -> None:
    by_loss = replace(table, metrics=(LOSS, ACCURACY))
    rows = by_loss.summary()["rows"]
    assert [(row["loss"], row["worse_by"]) for row in rows] == [(0.25, 0.0), (0.5, 0.25)]
    assert not any("drop" in row or "accuracy" in row for row in rows)
    by_loss.save(tmp_path)
    assert Comparison.load(tmp_path) == by_loss


def test_a_metric_is_found_by_name(table) -> None:
    assert table.metric(None) is ACCURACY and table.metric("loss") is LOSS
    with pytest.raises(StageError, match=r"^the comparison has no f1, but accuracy, loss$"):
        table.metric("f1")


def test_a_row_is_found_by_name(table) -> None:
    assert table.row("tiny").metrics["accuracy"] == 0.995
    assert table.row("net").latency(32, "all").median_ms == 1.25
    assert table.row("net").latency(32, "one") is None
    with pytest.raises(StageError, match=r"'tinny' is not in the comparison, which has net, tiny .*mean 'tiny'\?"):
        table.row("tinny")


@pytest.mark.parametrize("content", ["[]", "{}", '{"rows": [{"name": "a"}]}', '{"rows": [], "split": "test"}', "{"])
def test_another_file_is_no_comparison(tmp_path, content) -> None:
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(IntegrityError, match=r"comparison\.json is not a comparison"):
        Comparison.load(tmp_path)


def test_it_holds_for_the_machine_that_measured() -> None:
    assert eval_compare.per_machine and not eval_predict.per_machine
    assert isinstance(Context, type)
