"""gate.accuracy and gate.quality: a test of non-inferiority on paired samples, and limits of these samples."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import Context, Decision, StageError, Verdict
from ptpipe_eval import Comparison, Row, gate_accuracy, gate_quality
from ptpipe_eval.config import AccuracyConfig, QualityConfig
from ptpipe_eval.quality.paired import ModelSamples, PairedSamples, pair
from ptpipe_torch import Classification, Metric

PASSED, REFUSED, UNDECIDED = Decision.PASSED, Decision.REFUSED, Decision.UNDECIDED
CTX = Context("gate", "gate.accuracy", 7, Path())
TASK = Classification(class_names=("no", "yes"))
ACCURACY, LOSS = TASK.metrics


def table_of(samples: PairedSamples, metrics: tuple[Metric, ...], values: dict[str, dict[str, float]]) -> Comparison:
    rows = tuple(Row(name, "onnx int8", 100, of) for name, of in values.items())
    total = len(samples.ids)
    return Comparison("mnist", "test", total, metrics, "float", rows, "by hand", "2026-01-02T03:04:05+00:00", samples)


def right(num_lost: int, num_gained: int, num_both: int, total: int) -> np.ndarray:
    """Which samples a baseline and a candidate have right, (2, N)."""
    right_2N = np.zeros((2, total), dtype=bool)
    right_2N[0, : num_lost + num_both] = True
    right_2N[1, num_lost : num_lost + num_both + num_gained] = True
    return right_2N


@cache
def compared(num_lost: int = 17, num_gained: int = 5, num_both: int = 9885, total: int = 10_000) -> Comparison:
    """A table of `float` and `int8`, which is 0.12 points worse; its loss is higher by 0.01 on average."""
    right_2N = right(num_lost, num_gained, num_both, total)
    noise_N = np.random.default_rng(0).normal(0.01, 0.1, total)
    losses = np.full(total, 0.03), 0.03 + noise_N
    models = [
        ModelSamples({"accuracy": right_N, "loss": loss_N}, None, None, is_complete=True)
        for right_N, loss_N in zip(right_2N, losses, strict=True)
    ]
    samples = pair(TASK, models, 0, [str(i) for i in range(total)], 7)
    values = {
        name: {"accuracy": int(right_N.sum()) / total, "loss": float(loss_N.mean())}
        for name, right_N, loss_N in zip(("float", "int8"), right_2N, losses, strict=True)
    }
    return table_of(samples, TASK.metrics, values)


def judge_accuracy(comparison: Comparison, **options: object) -> Verdict:
    return gate_accuracy(AccuracyConfig(**{"candidate": "int8"} | options), CTX, comparison)


def judge_quality(comparison: Comparison, **options: object) -> Verdict:
    return gate_quality(QualityConfig(**{"candidate": "int8"} | options), CTX, comparison)


def test_a_small_loss_passes_and_the_reason_has_the_numbers() -> None:
    verdict = judge_accuracy(compared(), max_drop=0.003)
    assert verdict.decision is PASSED
    assert verdict.reason == (
        "int8 loses 0.12 points of accuracy against float (drop at most 0.21 with 95 % confidence), allowed 0.30: "
        "98.90 % vs 99.02 %, 17 lost and 5 gained of 10,000 samples"
    )
    low, high = compared().drop("int8", ACCURACY).limits(0.95)
    assert verdict.facts == {
        "candidate": "int8",
        "baseline": "float",
        "accuracy": 0.989,
        "baseline_accuracy": 0.9902,
        "drop": 0.0012,
        "drop_low": low,
        "drop_high": high,
        "confidence": 0.95,
        "max_drop": 0.003,
        "num_samples_needed": compared().drop("int8", ACCURACY).num_samples_needed(0.003, 0.95),
        "num_samples": 10_000,
        "min_accuracy": None,
    }


def test_a_large_loss_is_refused() -> None:
    verdict = judge_accuracy(compared(110, 8, 9880), max_drop=0.003)
    assert verdict.decision is REFUSED
    assert verdict.reason == (
        "int8 loses 1.02 points of accuracy against float (drop at least 0.85 with 95 % confidence), allowed 0.30: "
        "98.88 % vs 99.90 %, 110 lost and 8 gained of 10,000 samples"
    )


@pytest.mark.parametrize(
    ("told", "fails"), [({}, False), ({"on_inconclusive": "warn"}, False), ({"on_inconclusive": "fail"}, True)]
)
def test_what_the_samples_cannot_tell_is_undecided(told, fails) -> None:
    verdict = judge_accuracy(compared(40, 15), max_drop=0.003, **told)
    assert (verdict.decision, verdict.fail_undecided) == (UNDECIDED, fails)
    assert verdict.reason == (
        "int8 loses 0.25 points of accuracy against float (drop between 0.13 and 0.38 with 95 % confidence), allowed "
        "0.30: 99.00 % vs 99.25 %, 40 lost and 15 gained of 10,000 samples; 10,000 samples are too few to tell, about "
        "150,000 would do"
    )


@pytest.mark.parametrize(("option", "fails"), [("estimate", True), ("warn", False), ("fail", True)])
def test_a_drop_above_the_limit_that_may_be_chance_ends_the_run_unless_it_is_to_warn(option, fails) -> None:
    for judge in (judge_accuracy, judge_quality):
        verdict = judge(compared(69, 25, 9861), max_drop=0.003, on_inconclusive=option)
        assert (verdict.decision, verdict.fail_undecided) == (UNDECIDED, fails)
        assert verdict.reason.endswith("; 10,000 samples are too few to tell, about 29,000 would show that it is more")
        assert judge(compared(), max_drop=0.003, on_inconclusive=option).decision is PASSED
    at_the_limit = judge_accuracy(compared(40, 10, 9900), max_drop=0.003)
    assert (at_the_limit.decision, at_the_limit.fail_undecided) == (UNDECIDED, False)


def test_few_samples_are_not_enough_even_where_none_is_lost() -> None:
    verdict = judge_accuracy(compared(0, 0, 353, 360), max_drop=0.003)
    assert verdict.decision is UNDECIDED
    assert "loses 0.00 points" in verdict.reason and "drop between -0.75 and 0.75 with 95 %" in verdict.reason
    assert verdict.reason.endswith("360 samples are too few to tell, about 900 would do")
    assert judge_accuracy(compared(0, 0, 353, 360), max_drop=0.01).decision is PASSED


def test_a_damaged_model_is_refused_by_few_samples_too() -> None:
    assert judge_accuracy(compared(300, 2, 53, 360), max_drop=0.003).decision is REFUSED


def test_no_loss_at_all_cannot_be_shown() -> None:
    same = judge_accuracy(compared(0, 0), max_drop=0)
    assert same.decision is UNDECIDED
    assert same.reason.endswith("and no number shows that nothing at all is lost: allow a small drop")
    assert judge_accuracy(compared(17, 5), max_drop=0).decision is REFUSED
    assert judge_accuracy(compared(5, 40), max_drop=0).decision is PASSED  # better, beyond chance


def test_a_gain_is_called_one() -> None:
    verdict = judge_accuracy(compared(10, 18, 9880), max_drop=0.003)
    assert verdict.decision is PASSED
    assert verdict.reason.startswith("int8 gains 0.08 points of accuracy against float (drop at most 0.0")
    sure = judge_accuracy(compared(5, 40), max_drop=0.003)
    assert sure.reason.startswith("int8 gains 0.35 points of accuracy against float (gain at least 0.2")


def test_a_higher_confidence_decides_less() -> None:
    decisions = [judge_accuracy(compared(34, 13), max_drop=0.003, confidence=c).decision for c in (0.8, 0.95, 0.999)]
    assert decisions == [PASSED, UNDECIDED, UNDECIDED]
    assert "with 99.9 % confidence" in judge_accuracy(compared(34, 13), max_drop=0.003, confidence=0.999).reason


@given(st.integers(1, 5000), st.data(), st.sampled_from([0.0, 0.001, 0.003, 0.05, 0.3]))
def test_the_decision_is_where_the_limits_are(total, data, max_drop) -> None:
    num_lost = data.draw(st.integers(0, total))
    num_gained = data.draw(st.integers(0, total - num_lost))
    right_2N = right(num_lost, num_gained, 0, total)
    samples = PairedSamples(("",) * total, 0, {"accuracy": right_2N}, None, {})
    values = {n: {"accuracy": int(of.sum()) / total} for n, of in zip(("float", "int8"), right_2N, strict=True)}
    verdict = judge_accuracy(table_of(samples, (ACCURACY,), values), max_drop=max_drop)
    low, high = verdict.facts["drop_low"], verdict.facts["drop_high"]
    assert low <= (num_lost - num_gained) / total <= high
    assert verdict.decision is (PASSED if high < max_drop else REFUSED if low > max_drop else UNDECIDED)
    assert ("too few" in verdict.reason) == (verdict.decision is UNDECIDED)


def test_a_minimum_accuracy_is_of_these_samples() -> None:
    assert judge_accuracy(compared(), min_accuracy=0.989).decision is PASSED
    refused = judge_accuracy(compared(), min_accuracy=0.9891)
    assert refused.decision is REFUSED
    assert refused.reason == "int8 has 98.90 % (9,890 of 10,000 samples), minimum 98.91 %"
    assert judge_accuracy(compared(), candidate="float", min_accuracy=0.99).decision is PASSED


def test_of_two_limits_the_violated_ones_are_named_and_else_the_undecided() -> None:
    both = judge_accuracy(compared(110, 8, 9000), max_drop=0.003, min_accuracy=0.98)
    assert both.decision is REFUSED and "loses" in both.reason and "minimum" in both.reason
    floor = judge_accuracy(compared(40, 15, 9000), max_drop=0.003, min_accuracy=0.98)
    assert floor.decision is REFUSED and "loses" not in floor.reason and "minimum" in floor.reason
    undecided = judge_accuracy(compared(40, 15), max_drop=0.003, min_accuracy=0.98)
    assert undecided.decision is UNDECIDED and "loses" in undecided.reason and "minimum" not in undecided.reason


def test_digits_are_enough_to_tell_single_samples_apart() -> None:
    reason = judge_accuracy(compared(1, 0, 48_999, 50_000), max_drop=0.1).reason
    assert "loses 0.002 points" in reason and "97.998 % vs 98.000 %" in reason


def test_a_task_without_accuracy_has_another_gate() -> None:
    table = replace(compared(), metrics=(LOSS,))
    with pytest.raises(StageError, match=r"^the comparison has no accuracy, but loss$"):
        judge_accuracy(table, max_drop=0.1)


def test_accuracy_is_judged_whatever_models_are_compared_by() -> None:
    by_loss = replace(compared(), metrics=(LOSS, ACCURACY))
    assert judge_accuracy(by_loss, max_drop=0.003).reason == judge_accuracy(compared(), max_drop=0.003).reason


def test_quality_is_the_primary_metric_unless_another_is_named() -> None:
    accuracy = judge_accuracy(compared(), max_drop=0.003)
    verdict = judge_quality(compared(), max_drop=0.003)
    assert (verdict.decision, verdict.reason) == (accuracy.decision, accuracy.reason)
    assert verdict.facts["metric"] == "accuracy" and verdict.facts["drop_high"] == accuracy.facts["drop_high"]


def test_quality_of_a_metric_that_is_resampled() -> None:
    table = compared()
    low, high = table.drop("int8", LOSS).limits(0.95)
    assert 0.007 < low < 0.01 < high < 0.013
    limits = (0.02, 0.005, 0.0107)
    passed, refused, undecided = (judge_quality(table, metric="loss", max_drop=limit) for limit in limits)
    assert (passed.decision, refused.decision, undecided.decision) == (PASSED, REFUSED, UNDECIDED)
    assert passed.reason.startswith(f"int8 is 0.0106 worse in loss than float (drop at most {high:.3g} with 95 %")
    assert passed.reason.endswith("allowed 0.02: 0.040631 vs 0.03, 10,000 samples")
    assert passed.facts["worse_by"] == pytest.approx(0.0106, abs=1e-4) and "drop" not in passed.facts
    assert " samples are too few to tell, about " in undecided.reason


def test_quality_minimum_and_maximum() -> None:
    assert judge_quality(compared(), min_value=0.989).decision is PASSED
    refused = judge_quality(compared(), min_value=0.9891)
    assert (refused.decision, refused.reason) == (REFUSED, "int8 has 98.90 % accuracy, minimum 98.91 %")
    assert judge_quality(compared(), metric="loss", max_value=0.05).decision is PASSED
    refused = judge_quality(compared(), metric="loss", max_value=0.039)
    assert (refused.decision, refused.reason) == (REFUSED, "int8 has 0.040631 loss, maximum 0.039")


def test_a_limit_that_every_worse_model_meets_is_an_error() -> None:
    with pytest.raises(StageError, match=r"^lower loss is better, and every worse model meets min_value: give max_val"):
        judge_quality(compared(), metric="loss", min_value=0.01)
    with pytest.raises(StageError, match=r"^higher accuracy is better, and every worse model meets max_value: give mi"):
        judge_quality(compared(), max_value=0.99)
    assert judge_quality(compared(), min_value=0.9, max_value=0.99).decision is PASSED, "a range is one on purpose"


def test_quality_of_an_unknown_metric_names_the_known() -> None:
    with pytest.raises(StageError, match=r"^the comparison has no top1, but accuracy, loss$"):
        judge_quality(compared(), metric="top1", max_drop=0)


def test_without_facts_of_single_samples_nothing_is_decided() -> None:
    verdict = judge_accuracy(replace(compared(), samples=None), max_drop=0.5, on_inconclusive="fail")
    assert (verdict.decision, verdict.fail_undecided) == (UNDECIDED, True)
    assert verdict.reason == (
        "int8 loses 0.12 points of accuracy against float; its interval is not known: the comparison has no facts of "
        "single samples"
    )
    assert verdict.facts["drop_low"] is None


def test_samples_that_are_too_many_are_named_as_the_reason() -> None:
    samples = replace(compared().samples, bootstraps={}, too_large=("loss",))
    verdict = judge_quality(replace(compared(), samples=samples), metric="loss", max_drop=0.5)
    assert verdict.decision is UNDECIDED
    assert verdict.reason.endswith("; its interval is not known: too many samples for the memory that one may take")


def test_a_verdict_is_saved_and_loaded(tmp_path: Path) -> None:
    verdict = judge_accuracy(compared(), max_drop=0.003, min_accuracy=0.9)
    verdict.save(tmp_path)
    assert Verdict.load(tmp_path) == verdict


def test_an_unknown_candidate_is_an_error() -> None:
    for judge in (judge_accuracy, judge_quality):
        with pytest.raises(StageError, match=r"'intt8' is not in the comparison, which has float, int8 .*mean 'int8'"):
            judge(compared(), candidate="intt8", max_drop=0.1)
