"""Verdicts, figures, the front and the best, from what stages report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptpipe import StageConfig, UsageError, load_plan
from ptpipe_sweep.outcome import (
    Ending,
    Latency,
    Objective,
    Quality,
    best,
    check_model,
    judged_comparisons,
    judged_model,
    pareto_front,
    parse_objective,
    read_ending,
    seed_means,
)
from ptpipe_sweep.record import exit_code
from ptpipe_sweep.table import explanation

from .conftest import STAGES

BEGUN = Ending(1, {"lr": 0.1}, {"a.lr": 0.1}, 1)


def trial(number, quality=0.9, size=100, latency=None, code=0, higher=True):
    cell = Latency(latency[1], latency[0], latency[2], "batch 1, one thread") if latency else None
    return replace(
        BEGUN,
        number=number,
        exit_code=code,
        quality=None if quality is None else Quality("accuracy", quality, higher),
        size_bytes=size,
        latency=cell,
    )


def stage(stage_id, outcome="done", metrics=None, message="", **outputs):
    facts = {name: {"type": type_, "summary": summary} for name, (type_, summary) in outputs.items()}
    return {"stage_id": stage_id, "outcome": outcome, "metrics": metrics or {}, "message": message, "outputs": facts}


def cell(median_ms):
    return {"batch_size": 1, "threads": "one", "median_ms": median_ms, "low_ms": median_ms - 0.01, "high_ms": None}


def row(name, accuracy, size, *cells):
    return {"name": name, "metrics": {"accuracy": accuracy}, "size_bytes": size, "latency": list(cells)}


METRICS = [{"name": "accuracy", "higher_is_better": True}, {"name": "loss", "higher_is_better": False}]
COMPARISON = {"metrics": METRICS, "rows": [row("float", 0.99, 400, cell(1.0)), row("int8", 0.98, 100, cell(0.5))]}
RESULT = {
    "exit_code": 0,
    "run_id": "r-00001",
    "seconds": 2.5,
    "stages": [
        stage("net", "cached"),
        stage("train", metrics={"val_loss": 0.5, "ok": True, "history": [], "bad": float("nan")}),
        stage("compare", output=("ptpipe_eval.Comparison", COMPARISON)),
        stage("speed", output=("Comparison", {"metrics": [], "rows": [row("int8", 0, 100, cell(0.4))]})),
    ],
}


def test_figures_are_those_of_the_last_row_or_of_the_named_one():
    ending = read_ending(BEGUN, RESULT, None, "")
    assert (ending.verdict, ending.run_id, ending.seconds) == ("passed", "r-00001", 2.5)
    assert (ending.model, ending.quality, ending.size_bytes) == ("int8", Quality("accuracy", 0.98, True), 100)
    assert ending.latency == Latency(0.4, 0.39, None, "batch 1, one thread"), "of the last stage that measured it"
    assert (ending.num_cached, ending.num_stages) == (1, 4)
    named = read_ending(BEGUN, RESULT, None, "float")
    assert (named.model, named.quality.value, named.latency.median_ms) == ("float", 0.99, 1.0)
    assert read_ending(BEGUN, RESULT, None, "nothing").quality is None


def compared(accuracy, split, *names):
    rows = [row(name, accuracy, 100) for name in names]
    return "ptpipe_eval.Comparison", {"metrics": METRICS, "rows": rows, "split": split}


def test_figures_are_those_of_the_comparison_that_the_gate_judges():
    stages = [
        stage("first", output=compared(0.9, "test", "float", "int8")),
        stage("second", output=compared(0.8, "val", "float", "int8")),
        stage("other", output=compared(0.7, "test", "onnx")),
        stage("speed", output=("Comparison", {"metrics": [], "rows": [row("onnx", 0, 7, cell(0.4))]})),
    ]

    def figures(model, *comparisons):
        ending = read_ending(BEGUN, {"exit_code": 0, "stages": stages}, None, model, comparisons)
        return ending.comparison, ending.model, ending.split, ending.quality.value

    assert figures("int8", "first", "second", "other") == ("first", "int8", "test", 0.9)
    assert figures("int8", "second", "first", "other") == ("second", "int8", "val", 0.8)
    assert figures("onnx", "second", "first", "other") == ("other", "onnx", "test", 0.7), "the first that has the model"
    assert figures("") == ("first", "int8", "test", 0.9)
    assert read_ending(BEGUN, {"exit_code": 0, "stages": stages}, None, "").latency is None, "that is of another model"


def test_the_latency_is_of_the_first_comparison_that_measures_nothing_else():
    latencies = {"other": 99.0, "judged": 1.0, "third": 77.0}
    compared = {name: {"metrics": [], "rows": [row("int8", 0, 7, cell(value))]} for name, value in latencies.items()}
    stages = [*RESULT["stages"][:3], *(stage(name, output=("Comparison", found)) for name, found in compared.items())]
    for order in (["compare", "judged", "other"], ["judged", "compare"]):
        ending = read_ending(BEGUN, {"exit_code": 0, "stages": stages}, None, "int8", order)
        assert (ending.comparison, ending.latency.median_ms) == ("compare", 1.0)


def test_a_failed_stage_has_no_metrics_that_a_trial_is_compared_by():
    stages = [stage("train", "failed", metrics={"val_accuracy": 0.1}), stage("data", metrics={"samples": 3})]
    ending = read_ending(BEGUN, {"exit_code": 1, "stages": stages}, Objective("train", "val_accuracy", True), "")
    assert ending.quality is None and ending.metrics == {"data.samples": 3}


def test_an_objective_is_any_number_of_a_stage():
    ending = read_ending(BEGUN, RESULT, Objective("train", "val_loss", False), "")
    assert ending.quality == Quality("train.val_loss", 0.5, False)
    assert ending.metrics == {"train.val_loss": 0.5}, "no truth values, lists or nan"
    assert read_ending(BEGUN, RESULT, Objective("train", "bad", False), "").quality is None


def test_a_reason_is_that_of_the_failure_before_that_of_a_gate():
    refused = stage("gate", "refused", output=("Verdict", {"decision": "refused", "reason": "loses 3 points"}))
    ending = read_ending(BEGUN, {"exit_code": 3, "stages": [refused]}, None, "")
    assert (ending.verdict, ending.message) == ("refused", "gate: loses 3 points")
    stages = [refused, stage("train", "failed", message="the loss became nan")]
    ending = read_ending(BEGUN, {"exit_code": 1, "stages": stages}, None, "")
    assert (ending.verdict, ending.message) == ("failed", "train: the loss became nan")
    assert read_ending(BEGUN, {"exit_code": 2, "message": "no engine"}, None, "").verdict == "failed"


def test_a_gate_that_could_not_decide_has_not_passed():
    """It ends a trial with exit code 0 unless it is configured to fail then."""
    facts = {"decision": "undecided", "reason": "200 samples are too few"}
    ending = read_ending(BEGUN, {"exit_code": 0, "stages": [stage("gate", output=("Verdict", facts))]}, None, "")
    assert (ending.verdict, ending.message) == ("undecided", "gate: 200 samples are too few")
    assert ending.is_accepted and not read_ending(BEGUN, RESULT, None, "").is_undecided
    trials = [replace(trial(1, 0.99, 400), is_undecided=True), trial(2, 0.98, 400)]
    assert pareto_front(trials) == {1} and best(trials).number == 1
    assert explanation(trials).endswith(
        "that passed or is undecided is better without being worse in something else (1)"
    )


def test_the_front_has_whom_no_other_trial_beats():
    trials = [trial(1, 0.99, 400), trial(2, 0.98, 100), trial(3, 0.97, 200), trial(4, 0.99, 400)]
    assert pareto_front(trials) == {1, 2, 4}, "3 is worse and larger than 2; equals are all on it"
    assert pareto_front([*trials, trial(5, 1.0, 50, code=3)]) == {1, 2, 4}, "what a gate refused is not shipped"
    assert pareto_front([trial(1, 0.5, higher=False), trial(2, 0.6, higher=False)]) == {1}
    assert pareto_front([trial(1, None)]) == set()


def test_latencies_count_where_their_intervals_are_apart():
    slow, near, fast = (0.9, 1.0, 1.1), (0.85, 0.95, 1.05), (0.4, 0.5, 0.6)
    assert pareto_front([trial(1, 0.99, latency=slow), trial(2, 0.98, latency=near)]) == {1}
    assert pareto_front([trial(1, 0.99, latency=slow), trial(2, 0.98, latency=fast)]) == {1, 2}
    assert pareto_front([trial(1, 0.99, latency=slow), trial(2, 0.98, latency=fast), trial(3, 0.9)]) == {1}, (
        "not measured in all"
    )


def test_the_best_passed_and_is_the_smallest_of_equals():
    trials = [trial(1, 0.98, 50), trial(2, 0.99, 400), trial(3, 0.99, 100), trial(4, 0.99, 100), trial(5, 1, code=3)]
    assert best(trials).number == 3
    assert best([trial(1, 0.5, higher=False), trial(2, 0.4, higher=False)]).number == 2
    assert best([trial(1, None), trial(2, 0.9, code=1)]) is None


def seeded(number, lr, seed, quality, code=0):
    return replace(trial(number, quality, code=code), settings={"lr": lr, "seed": seed})


def test_settings_are_compared_by_the_mean_over_seeds():
    lucky = [seeded(1, 0.1, 1, 0.99), seeded(2, 0.1, 2, 0.90), seeded(3, 0.1, 3, 0.90)]
    steady = [seeded(4, 0.2, 1, 0.95), seeded(5, 0.2, 2, 0.96), seeded(6, 0.2, 3, 0.97)]
    fragile = [seeded(7, 0.3, 1, 0.98), seeded(8, 0.3, 2, 0.98, code=3), seeded(9, 0.3, 3, None, code=1)]
    trials = [*lucky, *steady, *fragile]
    assert best(trials) is trials[3], "the first seed of the best mean that all gates passed"
    assert pareto_front([*lucky, *steady]) == {4, 5, 6}
    first, second, third = seed_means(trials)
    assert first.mean == pytest.approx(0.93) and (first.low, first.high) == (0.90, 0.99)
    assert (second.settings, second.trials, second.num_others) == ({"lr": 0.2}, (4, 5, 6), 0)
    assert (third.trials, third.num_others) == ((7,), 2)


def test_seeds_alone_are_trials():
    trials = [replace(trial(number, quality), settings={"seed": number}) for number, quality in ((1, 0.9), (2, 0.99))]
    assert best(trials).number == 2 and seed_means(trials) == []


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 3], 0), ([0, 4], 0), ([3, 4], 3), ([4], 4), ([0, 1, 3], 1), ([0, 2], 1), ([1, 5, 0], 5), ([0, 130], 1)],
)
def test_the_exit_code_of_a_sweep(codes, expected):
    assert exit_code([trial(number, code=code) for number, code in enumerate(codes)]) == expected


def test_an_objective_names_a_stage_and_a_metric(project):
    project.write(STAGES)
    plan = project.plan()
    assert parse_objective("one.value", True, plan) == Objective("one", "value", True)
    assert parse_objective("one.onnx.accuracy", False, plan).metric == "onnx.accuracy"
    with pytest.raises(UsageError, match=r"--maximize oen.value: .* no stage 'oen' \(did you mean 'one'"):
        parse_objective("oen.value", True, plan)
    with pytest.raises(UsageError, match="--minimize one: name a metric of it"):
        parse_objective("one", False, plan)


class Judged(StageConfig):
    candidate: str | None = None
    candidates: tuple[str, ...] | None = None


def test_the_judged_model_is_that_of_the_last_gate(project):
    project.write(STAGES)
    plan = project.plan()
    assert judged_model(plan) == ""
    first, *_, last = plan.stages
    one, several = replace(first, config=Judged(candidate="int8")), replace(last, config=Judged(candidates=("a", "b")))
    assert judged_model(replace(plan, stages=(one, last))) == "int8"
    assert judged_model(replace(plan, stages=(one, several))) == "b"


def test_a_model_is_one_that_the_manifest_compares():
    manifest = {
        "version": 1,
        "name": "compared",
        "stages": {
            "data": {"uses": "data.digits"},
            "net": {"uses": "model.mlp"},
            "train": {"uses": "train.supervised"},
            "compare": {"uses": "eval.compare", "needs": {"models": ["net", "train"]}},
        },
    }
    plan = load_plan(manifest)
    check_model("train", plan)
    with pytest.raises(UsageError, match=r"^--model trian: the manifest compares no such model \(did you mean 'train'"):
        check_model("trian", plan)
    with pytest.raises(UsageError, match=r"\(it compares net, train\)$"):
        check_model("int8", plan)


def test_comparisons_are_ordered_by_the_gates_that_judge_them():
    compare = {"uses": "eval.compare", "needs": {"models": ["net", "train"]}}
    gate = {"uses": "gate.accuracy", "needs": {"comparison": "second"}, "with": {"candidate": "train", "max_drop": 0.1}}
    stages = {
        "data": {"uses": "data.digits"},
        "net": {"uses": "model.mlp"},
        "train": {"uses": "train.supervised"},
        **dict.fromkeys(("first", "second", "third"), compare),
        "gate": gate,
        "last": {**gate, "needs": {"comparison": "third"}},
    }
    plan = load_plan({"version": 1, "name": "compared", "stages": stages})
    assert judged_comparisons(plan) == ("third", "second", "first")
    with pytest.raises(UsageError, match=r"\(it compares net, train\)$"):
        check_model("int8", plan)
