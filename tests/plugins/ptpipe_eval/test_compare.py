from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from ptpipe import Context, IntegrityError, StageError, host
from ptpipe.events import Metric, Notice, Progress
from ptpipe_eval import Comparison, Latency, Row, eval_compare, eval_predict, timing
from ptpipe_eval.config import CompareConfig, PredictConfig
from ptpipe_eval.quality import recorder
from ptpipe_torch import Metric as TaskMetric

QUICK = {"budget_s": 0.002}
ACCURACY = TaskMetric("accuracy", higher_is_better=True, is_fraction=True)
LOSS = TaskMetric("loss", higher_is_better=False)


@pytest.fixture
def table() -> Comparison:
    cells = (Latency(1, "one", 1, 0.1, 0.11, 0.15, 500, 0.02), Latency(32, "all", 2, 1.0, 1.25, 1.5, 60))
    rows = (
        Row("net", "torch float32", 1000, {"accuracy": 0.99, "loss": 0.25}, cells),
        Row("tiny", "onnx int8", 250, {"accuracy": 0.995, "loss": 0.5}),
    )
    metrics = (ACCURACY, LOSS)
    return Comparison("digits", "test", 200, metrics, "net", rows, "by stopwatch", "2026-01-02T03:04:05+00:00")


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


def test_every_cell_is_timed(digits, pair, context) -> None:
    made = eval_compare(CompareConfig(batch_sizes=(1, 5), **QUICK), context(models=("a", "b")), pair, digits)
    for row in made.rows:
        assert [(cell.batch_size, cell.threads, cell.num_threads) for cell in row.latencies] == [
            (1, "one", 1),
            (5, "one", 1),
            (1, "all", host.num_threads()),
            (5, "all", host.num_threads()),
        ]
        for cell in row.latencies:
            assert 0 < cell.p10_ms <= cell.median_ms <= cell.p90_ms
            assert cell.num_runs >= 5


@pytest.mark.parametrize(
    ("options", "opened"),
    [
        ({}, [None, 1]),
        ({"threads": ("all",)}, [None]),
        ({"threads": ("one",)}, [None, 1]),
        ({"batch_sizes": ()}, [None]),
    ],
)
def test_each_model_is_made_ready_once_for_each_number_of_threads(digits, pair, context, options, opened) -> None:
    made = eval_compare(CompareConfig(**QUICK | options), context(models=("a", "b")), pair, digits)
    assert [model.opened_with for model in pair] == [opened] * 2
    expected = len(options.get("batch_sizes", (1, 32))) * len(options.get("threads", ("one", "all")))
    assert [len(row.latencies) for row in made.rows] == [expected] * 2


def test_predictions_of_whole_batches_of_real_samples_are_timed(digits, linear_model, weights, context) -> None:
    seen = []

    class Watched(linear_model):
        def predict(self, images_NCHW):
            seen.append(images_NCHW.copy())
            return super().predict(images_NCHW)

    options = {"threads": ("one",), "batch_sizes": (3,), "batch_size": 400} | QUICK
    eval_compare(CompareConfig(**options), context(models=("a",)), [Watched(*weights)], digits)
    assert {len(images) for images in seen[1:]} == {3}
    samples = {image.tobytes() for image in seen[0]}
    assert {image.tobytes() for images in seen[1:] for image in images} <= samples


def test_baseline_is_the_first_or_the_one_named(digits, pair, context) -> None:
    ctx = context(models=("a", "b"))
    first = eval_compare(CompareConfig(batch_sizes=(), **QUICK), ctx, pair, digits)
    named = eval_compare(CompareConfig(baseline="b", batch_sizes=(), **QUICK), ctx, pair, digits)
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


def test_a_model_with_nan_logits_is_named(digits, linear_model, weights, context) -> None:
    broken = linear_model(weights[0], np.full(10, np.nan, np.float32))
    with pytest.raises(StageError, match="broken: the logits of sample test/00000 are not finite"):
        eval_compare(CompareConfig(), context(models=("broken",)), [broken], digits)


def test_progress_and_metrics_are_reported(digits, pair, context, events) -> None:
    made = eval_compare(CompareConfig(**QUICK), context(models=("a", "b")), pair, digits)
    steps = [event for event in events if isinstance(event, Progress)]
    assert [(step.done, step.total, step.facts["model"]) for step in steps][-1] == (800, 800, "b")
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    metrics = {event.name: event.value for event in events if isinstance(event, Metric)}
    assert metrics == {f"{row.name}.accuracy": row.metrics["accuracy"] for row in made.rows}


def test_cpu_contention_is_reported(digits, pair, context, events, monkeypatch) -> None:
    def measured(waits_ns):
        waits = iter(waits_ns)
        monkeypatch.setattr(timing, "measure", lambda *_: timing.Runs([1_000_000] * 5, next(waits)))
        events.clear()
        eval_compare(CompareConfig(batch_sizes=(1,), threads=("one",)), context(models=("a", "b")), pair, digits)
        return [event.text for event in events if isinstance(event, Notice)]

    assert measured([None, None]) == []
    assert measured([0, 400_000]) == []
    assert measured([0, 2_000_000]) == [
        "1 of 2 latencies were measured while other programs used the processor, up to 40 % of the time "
        "(b, batch 1, one thread), and may be too high; --fresh stage measures again"
    ]


def test_a_comparison_is_saved_and_loaded(digits, pair, context, tmp_path) -> None:
    made = eval_compare(CompareConfig(baseline="b", **QUICK), context(models=("a", "b")), pair, digits)
    (tmp_path / "kept").mkdir()
    made.save(tmp_path / "kept")
    assert Comparison.load(tmp_path / "kept") == made
    assert json.loads((tmp_path / "kept" / "comparison.json").read_text()) == made.summary()


def test_models_are_compared_sample_by_sample(digits, pair, context, tmp_path) -> None:
    ctx = context(models=("b", "a"))
    made = eval_compare(CompareConfig(baseline="a", batch_sizes=(), **QUICK), ctx, pair[::-1], digits)
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
        "no interval for loss: it takes too much memory, or some draws of the samples have none"
    ]


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
                        "p10_ms": 0.1,
                        "median_ms": 0.11,
                        "p90_ms": 0.15,
                        "num_runs": 500,
                        "waited_fraction": 0.02,
                    },
                    {
                        "batch_size": 32,
                        "threads": "all",
                        "num_threads": 2,
                        "p10_ms": 1.0,
                        "median_ms": 1.25,
                        "p90_ms": 1.5,
                        "num_runs": 60,
                        "waited_fraction": None,
                    },
                ],
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
            },
        ],
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
