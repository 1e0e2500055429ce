"""select.best and select.model: which of several models is handed on, and how often a bad one is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ptpipe import Context, Decision, StageError, Verdict
from ptpipe_eval import Comparison, Row, gate_accuracy, gate_size, select_best, select_model
from ptpipe_eval.config import AccuracyConfig, SelectConfig, SizeConfig
from ptpipe_eval.quality.holm import holm
from ptpipe_eval.quality.paired import PairedSamples
from ptpipe_torch import Metric, Selected
from ptpipe_torch.quality.proportions import tango_p

from ...latencies import latency

pytest_plugins = ["ptpipe.testing"]

PASSED, REFUSED, UNDECIDED = Decision.PASSED, Decision.REFUSED, Decision.UNDECIDED
METRIC = Metric("accuracy", higher_is_better=True, is_fraction=True)
TOTAL = 10_000
CTX = Context("gate", "gate.accuracy", 7, Path())


def table(
    sizes: dict[str, int] | None = None, ratios: dict[str, float | None] | None = None, **lost: int
) -> Comparison:
    """A comparison of `float` with models that lose so many of 10,000 samples, and gain none."""
    right = np.ones((1 + len(lost), TOTAL), dtype=bool)
    right[0, 9_900:] = False
    right[1:] = right[0]
    for row, number in enumerate(lost.values(), start=1):
        right[row, :number] = False
    rows = []
    for name, right_N in zip(("float", *lost), right, strict=True):
        ratio = (ratios or {}).get(name, 1.0)
        cell = latency(1, 0.2 * (ratio or 1), ratio or 1.0)
        if ratio is None:
            cell = replace(cell, ratio_low=None, ratio_high=None, speed="unmeasurable")
        size = (sizes or {}).get(name, 1000)
        rows.append(Row(name, "onnx int8", size, {"accuracy": int(right_N.sum()) / TOTAL}, (cell,)))
    samples = PairedSamples(tuple(map(str, range(TOTAL))), 0, {"accuracy": right}, None, {})
    return Comparison("mnist", "test", TOTAL, (METRIC,), "float", tuple(rows), "", "2026-01-02", samples)


def select(comparison: Comparison, *names: str, **options: object) -> tuple[str, Verdict]:
    """The name of the selected model, empty where none is, and the verdict."""
    names = names or tuple(row.name for row in comparison.rows[1:])
    models = [SimpleNamespace(own=name) for name in names]
    ctx = Context("best", "select.best", 7, Path(), {"models": names})
    model, verdict = select_best(SelectConfig(**{"max_drop": 0.003} | options), ctx, comparison, models)
    assert (model.chosen is None) == (verdict.facts["selected"] is None)
    assert model.chosen is None or model.chosen.own == model.name == verdict.facts["selected"]
    return model.name, verdict


class TestSelectBest:
    def test_the_smallest_that_passes(self) -> None:
        found = table(a=5, b=8, c=300, sizes={"a": 30, "b": 20, "c": 10})
        name, verdict = select(found)
        assert (name, verdict.decision) == ("b", PASSED)
        assert verdict.reason == (
            "b is the smallest of 2 of 3 candidates that pass: b loses 0.08 points of accuracy against float (drop at "
            "most 0.14 with 95 % confidence), allowed 0.30: 98.92 % vs 99.00 %, 8 lost and 0 gained of 10,000 samples"
        )
        rows = verdict.facts["candidates"]
        assert [(row["candidate"], row["decision"]) for row in rows] == [
            ("a", "passed"),
            ("b", "passed"),
            ("c", "refused"),
        ]
        assert rows[0]["p_value"] < rows[0]["p_value_holm"] < 0.05 and rows[2]["p_value_holm"] == 1

    def test_by_quality_and_by_latency(self) -> None:
        found = table(a=8, b=5, c=8, sizes={"a": 10, "b": 20, "c": 30}, ratios={"a": 0.9, "b": 0.8, "c": 0.5})
        assert select(found)[0] == "a"
        assert select(found, by="quality")[0] == "b"
        name, verdict = select(found, by="latency")
        assert name == "c" and verdict.reason.startswith("c is the fastest of 3 of 3 candidates that pass: ")

    def test_latencies_that_are_the_same_within_noise_leave_the_choice_to_size(self) -> None:
        sizes, near = {"a": 30, "b": 20, "c": 10}, {"a": 0.5, "b": 0.51, "c": 0.6}
        name, verdict = select(table(a=5, b=5, c=5, sizes=sizes, ratios=near), by="latency")
        assert name == "b"
        assert verdict.reason.startswith("b is the smallest (latency does not decide) of 3 of 3 candidates")
        unknown = table(a=5, b=5, c=5, sizes=sizes, ratios={**near, "b": None})
        assert select(unknown, by="latency")[0] == "c"

    def test_between_equals_the_first(self) -> None:
        name, verdict = select(table(a=5, b=5))
        assert name == "a" and verdict.reason.startswith("a is the first of 2 of 2 candidates that pass: ")
        assert select(table(a=5, b=4))[0] == "b", "size and latency are the same: then quality"

    def test_none_passes(self) -> None:
        name, verdict = select(table(a=300, b=400))
        assert (name, verdict.decision) == ("", REFUSED)
        assert (
            verdict.reason.startswith("none of 2 candidates is selected: a loses 3.00 points")
            and "; b " in verdict.reason
        )

    def test_the_baseline_is_what_remains(self) -> None:
        found = table(a=300, sizes={"float": 4000, "a": 10})
        name, verdict = select(found, "a", "float")
        assert (name, verdict.decision) == ("float", PASSED)
        assert verdict.reason == "float is the only one of 1 of 2 candidates that pass: float is the baseline"
        assert select(table(a=5, sizes={"float": 4000, "a": 10}), "float", "a")[0] == "a"
        single = select(table(a=17), "a")[1].facts["candidates"][0]
        beside = select(table(a=17), "a", "float")[1].facts["candidates"][0]
        assert single["p_value_holm"] == beside["p_value_holm"] == single["p_value"], "it is not tested"

    @pytest.mark.parametrize(
        ("option", "lost", "selected", "fails"),
        [
            ("estimate", 25, "a", False),
            ("estimate", 32, "", True),
            ("warn", 32, "a", False),
            ("fail", 25, "", True),
        ],
    )
    def test_what_is_undecided(self, option, lost, selected, fails) -> None:
        name, verdict = select(table(a=lost, b=300), on_inconclusive=option)
        assert (name, verdict.decision, verdict.fail_undecided) == (selected, UNDECIDED, fails)
        assert verdict.reason.startswith(
            "a is the only one of 1 of 2 candidates that may pass: " if name else "none of 2"
        )
        assert select(table(a=lost, b=5), on_inconclusive=option)[0] == "b", "one that passes goes first"

    def test_among_several_more_is_asked_of_each(self) -> None:
        alone = gate_accuracy(AccuracyConfig(candidate="a", max_drop=0.003), CTX, table(a=18))
        assert alone.decision is PASSED and select(table(a=18))[1].decision is PASSED
        verdict = select(table(a=18, b=300, c=300, d=300, e=300))[1]
        assert verdict.decision is UNDECIDED
        assert "as one of several candidates that is not enough: p = 0." in verdict.reason

    def test_unknown_names(self) -> None:
        with pytest.raises(StageError, match=r"'x' is not in the comparison, which has float, a"):
            select(table(a=5), "x")
        with pytest.raises(StageError, match=r"no f1, but accuracy"):
            select(table(a=5), metric="f1")


def test_a_choice_among_bad_models_is_wrong_in_one_of_twenty_cases() -> None:
    """Five models whose drop is the margin, on the same samples: none of them may pass."""
    random, margin, count = np.random.default_rng(0), 0.003, 1500
    chances = [0.0065, 0.0035, 0.99]
    counts = random.multinomial(10_000, chances, size=(count, 5))
    p_values = np.array([[tango_p(lost, gained, 10_000, margin) for lost, gained, _ in row] for row in counts])
    uncorrected = (p_values < 0.05).any(axis=1).mean()
    corrected = np.array([min(holm(row.tolist())) < 0.05 for row in p_values]).mean()
    assert uncorrected > 0.18
    assert 0.02 < corrected < 0.05 + 2 * (0.05 * 0.95 / count) ** 0.5


class TestSeveralCandidates:
    def judge(self, comparison: Comparison, *names: str, **options: object) -> Verdict:
        return gate_accuracy(AccuracyConfig(candidates=names, **{"max_drop": 0.003} | options), CTX, comparison)

    def test_all_must_pass(self) -> None:
        found = table(a=5, b=8, c=25, d=300)
        passed = self.judge(found, "a", "b")
        assert passed.decision is PASSED and passed.reason.startswith("2 of 2 candidates passed: a loses 0.05")
        undecided = self.judge(found, "a", "c", on_inconclusive="fail")
        assert (undecided.decision, undecided.fail_undecided) == (UNDECIDED, True)
        assert undecided.reason.startswith("1 of 2 candidates undecided: c loses 0.25")
        refused = self.judge(found, "a", "c", "d")
        assert refused.decision is REFUSED and refused.reason.startswith("1 of 3 candidates refused: d loses 3.00")
        assert [row["decision"] for row in refused.facts["candidates"]] == ["passed", "undecided", "refused"]
        assert refused.facts["baseline"] == "float"

    def test_each_is_judged_as_if_it_were_alone(self) -> None:
        found = table(a=18, b=300)
        row = self.judge(found, "a", "b").facts["candidates"][0]
        alone = gate_accuracy(AccuracyConfig(candidate="a", max_drop=0.003), CTX, found)
        assert row == {**alone.facts, "decision": "passed", "reason": alone.reason}

    def test_sizes(self) -> None:
        found = table(a=5, b=5, sizes={"float": 1000, "a": 200, "b": 300})
        assert gate_size(SizeConfig(candidates=("a", "b"), max_ratio=0.3), CTX, found).decision is PASSED
        refused = gate_size(SizeConfig(candidates=("a", "b"), max_ratio=0.2), CTX, found)
        assert refused.decision is REFUSED and refused.reason.startswith("1 of 2 candidates refused: b has 300 bytes")

    @pytest.mark.parametrize("options", [{}, {"candidate": "a", "candidates": ["b"]}, {"candidates": []}])
    def test_one_of_the_two_options(self, options) -> None:
        with pytest.raises(ValueError, match=r"give either candidate|at least 1 item"):
            SizeConfig(max_bytes=1, **options)

    def test_a_candidate_named_twice(self) -> None:
        with pytest.raises(ValueError, match="lists a value more than once"):
            SizeConfig(max_bytes=1, candidates=("a", "a"))


class TestSelectModel:
    def test_the_torch_model(self, bench, torch_model) -> None:
        taken = bench.run(select_model, {}, selected=Selected("static", torch_model))
        assert taken.recipe == torch_model.recipe

    def test_another_format(self, bench, pair) -> None:
        with pytest.raises(StageError, match=r"^the selected model, other, is no torch model but numpy float32$"):
            bench.run(select_model, {}, selected=Selected("other", pair[0]))
