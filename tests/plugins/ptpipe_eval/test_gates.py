from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ptpipe import Context, Decision, StageError, Verdict
from ptpipe_eval import Comparison, Row, gate_accuracy, gate_latency, gate_quality, gate_size
from ptpipe_eval.config import AccuracyConfig, LatencyConfig, QualityConfig, SizeConfig
from ptpipe_torch import Metric

PASSED, REFUSED = Decision.PASSED, Decision.REFUSED
CTX = Context("gate", "gate.accuracy", 7, Path())
METRICS = (Metric("accuracy", higher_is_better=True, is_fraction=True), Metric("loss", higher_is_better=False))


def compared(
    float_correct: int = 9902,
    int8_correct: int = 9890,
    num_samples: int = 10_000,
    losses: tuple[float, float] = (0.03, 0.04),
    **sizes: int,
) -> Comparison:
    def metrics(num_correct: int, loss: float) -> dict[str, float]:
        return {"accuracy": num_correct / num_samples, "loss": loss}

    of_float, of_int8 = metrics(float_correct, losses[0]), metrics(int8_correct, losses[1])
    rows = (
        Row("float", "torch float32", sizes.get("float_bytes", 1_692_915), of_float),
        Row("int8", "torch int8 fbgemm", sizes.get("int8_bytes", 434_197), of_int8),
    )
    return Comparison("mnist", "test", num_samples, METRICS, "float", rows, "by hand", "2026-01-02T03:04:05+00:00")


def judge_accuracy(comparison: Comparison, candidate: str = "int8", **limits: float) -> Verdict:
    return gate_accuracy(AccuracyConfig(candidate=candidate, **limits), CTX, comparison)


def judge_quality(comparison: Comparison, **options: object) -> Verdict:
    return gate_quality(QualityConfig(**{"candidate": "int8"} | options), CTX, comparison)


def judge_size(comparison: Comparison, **limits: float) -> Verdict:
    return gate_size(SizeConfig(candidate="int8", **limits), CTX, comparison)


def test_a_small_loss_passes_and_the_reason_has_the_numbers() -> None:
    verdict = judge_accuracy(compared(), max_drop=0.003)
    assert verdict.decision is PASSED
    assert verdict.reason == (
        "int8 loses 0.12 points (12 of 10,000 samples) against float: 98.90 % vs 99.02 %, allowed 0.30"
    )
    assert verdict.facts == {
        "candidate": "int8",
        "baseline": "float",
        "accuracy": 0.989,
        "baseline_accuracy": 0.9902,
        "drop": 0.0012,
        "num_samples": 10_000,
        "max_drop": 0.003,
        "min_accuracy": None,
    }


def test_a_large_loss_is_refused() -> None:
    verdict = judge_accuracy(compared(int8_correct=9800), max_drop=0.003)
    assert verdict.decision is REFUSED
    assert verdict.reason == (
        "int8 loses 1.02 points (102 of 10,000 samples) against float: 98.00 % vs 99.02 %, allowed 0.30"
    )


def test_a_gain_is_called_one() -> None:
    verdict = judge_accuracy(compared(int8_correct=9910), max_drop=0)
    assert verdict.decision is PASSED
    assert "int8 gains 0.08 points (8 of 10,000 samples) against float" in verdict.reason


@given(num_lost=st.integers(0, 50_000), num_samples=st.integers(1, 50_000))
def test_the_limit_itself_passes_and_one_sample_more_does_not(num_lost: int, num_samples: int) -> None:
    num_lost %= num_samples
    allowed = f"{num_lost / num_samples:.6f}"  # what a person may write: six decimals
    limit = Fraction(allowed)
    for lost in (num_lost, min(num_lost + 1, num_samples)):
        verdict = judge_accuracy(compared(num_samples, num_samples - lost, num_samples), max_drop=float(allowed))
        assert (verdict.decision is PASSED) == (Fraction(lost, num_samples) <= limit)


@pytest.mark.parametrize(("max_drop", "num_lost"), [(0.003, 30), (0.001, 10), (0.0007, 7), (0.29, 2900), (0.07, 700)])
def test_thirty_of_ten_thousand_are_three_thousandths(max_drop: float, num_lost: int) -> None:
    # In floats some of these differences come out above the limit: 0.9902 - 0.9872 > 0.003.
    assert judge_accuracy(compared(9902, 9902 - num_lost), max_drop=max_drop).decision is PASSED
    assert judge_accuracy(compared(9902, 9902 - num_lost - 1), max_drop=max_drop).decision is REFUSED


def test_a_minimum_accuracy() -> None:
    assert judge_accuracy(compared(), min_accuracy=0.989).decision is PASSED
    refused = judge_accuracy(compared(), min_accuracy=0.9891)
    assert refused.decision is REFUSED
    assert refused.reason == "int8 has 98.90 % (9,890 of 10,000 samples), minimum 98.91 %"
    assert judge_accuracy(compared(), candidate="float", min_accuracy=0.99).decision is PASSED


@pytest.mark.parametrize(("max_drop", "min_accuracy"), [(0.001, 0.98), (0.003, 0.995), (0.001, 0.995)])
def test_of_two_limits_the_violated_ones_are_named(max_drop: float, min_accuracy: float) -> None:
    verdict = judge_accuracy(compared(), max_drop=max_drop, min_accuracy=min_accuracy)
    assert verdict.decision is REFUSED
    assert ("loses" in verdict.reason) == (max_drop == 0.001)
    assert ("minimum" in verdict.reason) == (min_accuracy == 0.995)


def test_digits_are_enough_to_tell_single_samples_apart() -> None:
    reasons = [judge_accuracy(compared(49_000, n, 50_000), max_drop=0.1).reason for n in (48_999, 48_998)]
    assert "loses 0.002 points" in reasons[0] and "97.998 % vs 98.000 %" in reasons[0]
    assert "loses 0.004 points" in reasons[1]
    few = judge_accuracy(compared(350, 349, 360), max_drop=0.0027).reason
    assert "loses 0.28 points (1 of 360 samples)" in few and few.endswith("allowed 0.27")


def test_accuracy_is_judged_whatever_models_are_compared_by() -> None:
    by_loss = replace(compared(), metrics=METRICS[::-1])
    assert judge_accuracy(by_loss, max_drop=0.0012).decision is PASSED
    assert judge_accuracy(by_loss, max_drop=0.0011).decision is REFUSED


def test_a_task_without_accuracy_has_another_gate() -> None:
    with pytest.raises(StageError, match=r"^the comparison has no accuracy, but loss$"):
        judge_accuracy(without_accuracy(), max_drop=0.1)


def without_accuracy() -> Comparison:
    table = compared()
    rows = tuple(replace(row, metrics={"loss": row.metrics["loss"]}) for row in table.rows)
    return replace(table, metrics=METRICS[1:], rows=rows)


def test_quality_is_the_primary_metric_unless_another_is_named() -> None:
    verdict = judge_quality(compared(), max_drop=0.003)
    assert verdict.decision is PASSED
    assert verdict.reason == (
        "int8 is 0.12 points worse in accuracy than float: 98.90 % vs 99.02 %, allowed 0.30 points"
    )
    assert verdict.facts == {
        "candidate": "int8",
        "baseline": "float",
        "metric": "accuracy",
        "value": 0.989,
        "baseline_value": 0.9902,
        "drop": 0.0012,
        "num_samples": 10_000,
        "max_drop": 0.003,
        "min_value": None,
        "max_value": None,
    }
    assert judge_quality(without_accuracy(), max_value=1).facts["metric"] == "loss"


@pytest.mark.parametrize(("max_drop", "num_lost"), [(0.003, 30), (0.001, 10), (0.0007, 7), (0.29, 2900), (0.07, 700)])
def test_quality_a_drop_equal_to_the_limit_passes(max_drop: float, num_lost: int) -> None:
    assert judge_quality(compared(9902, 9902 - num_lost), max_drop=max_drop).decision is PASSED
    refused = judge_quality(compared(9902, 9902 - num_lost - 1), max_drop=max_drop)
    assert refused.decision is REFUSED and " worse in accuracy than float" in refused.reason


@given(
    st.sampled_from(METRICS),
    st.decimals(0, 1, places=6),
    st.decimals(0, 1, places=6),
    st.decimals(0, 1, places=6),
)
def test_quality_compares_as_decimals_do(metric: Metric, own: Decimal, other: Decimal, limit: Decimal) -> None:
    table = compared()
    values = {"float": float(other), "int8": float(own)}
    rows = tuple(replace(table.row(name), metrics={metric.name: value}) for name, value in values.items())
    verdict = judge_quality(replace(table, metrics=(metric,), rows=rows), max_drop=float(limit))
    worse_by = other - own if metric.higher_is_better else own - other
    assert (verdict.decision is PASSED) == (worse_by <= limit)
    assert (" worse in " in verdict.reason) == (worse_by >= 0) != (" better in " in verdict.reason)


def test_quality_where_lower_is_better() -> None:
    # 0.3 - 0.1 > 0.2 in floats.
    equal = judge_quality(compared(losses=(0.1, 0.3)), metric="loss", max_drop=0.2)
    assert equal.decision is PASSED
    assert equal.reason == "int8 is 0.2 worse in loss than float: 0.3 vs 0.1, allowed 0.2"
    assert (equal.facts["metric"], equal.facts["worse_by"]) == ("loss", 0.2) and "drop" not in equal.facts
    assert judge_quality(compared(losses=(0.1, 0.31)), metric="loss", max_drop=0.2).decision is REFUSED
    better = judge_quality(compared(losses=(0.3, 0.1)), metric="loss", max_drop=0)
    assert better.decision is PASSED and "int8 is 0.2 better in loss than float" in better.reason


def test_quality_minimum_and_maximum() -> None:
    assert judge_quality(compared(), min_value=0.989).decision is PASSED
    refused = judge_quality(compared(), min_value=0.9891)
    assert (refused.decision, refused.reason) == (REFUSED, "int8 has 98.90 % accuracy, minimum 98.91 %")
    assert judge_quality(compared(), metric="loss", max_value=0.04).decision is PASSED
    refused = judge_quality(compared(), metric="loss", max_value=0.039)
    assert (refused.decision, refused.reason) == (REFUSED, "int8 has 0.04 loss, maximum 0.039")
    assert judge_quality(compared(), candidate="float", metric="loss", max_value=0.03).decision is PASSED


def test_quality_of_several_limits_the_violated_ones_are_named() -> None:
    verdict = judge_quality(compared(), max_drop=0.001, min_value=0.98, max_value=0.98)
    assert verdict.decision is REFUSED
    assert "worse" in verdict.reason and "maximum" in verdict.reason and "minimum" not in verdict.reason


def test_quality_of_an_unknown_metric_names_the_known() -> None:
    with pytest.raises(StageError, match=r"^the comparison has no top1, but accuracy, loss$"):
        judge_quality(compared(), metric="top1", max_drop=0)


def test_size_against_the_baseline() -> None:
    verdict = judge_size(compared(), max_ratio=0.27)
    assert verdict.decision is PASSED
    assert verdict.reason == "int8 has 434,197 bytes, 25.65 % of float's 1,692,915, allowed 27 % (457,087 bytes)"
    assert verdict.facts["size_ratio"] == 434_197 / 1_692_915
    assert judge_size(compared(), max_ratio=0.25).decision is REFUSED
    # 0.29 * 100 is 28.999999999999996 in floats.
    exactly = judge_size(compared(float_bytes=100, int8_bytes=29), max_ratio=0.29)
    assert exactly.decision is PASSED and exactly.reason.endswith("allowed 29 % (29 bytes)")
    assert judge_size(compared(float_bytes=100, int8_bytes=30), max_ratio=0.29).decision is REFUSED


def test_size_in_bytes() -> None:
    assert judge_size(compared(), max_bytes=434_197).decision is PASSED
    refused = judge_size(compared(), max_bytes=434_196, max_ratio=0.5)
    assert (refused.decision, refused.reason) == (REFUSED, "int8 has 434,197 bytes, allowed 434,196")


def test_a_name_that_is_not_compared_is_an_error() -> None:
    with pytest.raises(StageError, match=r"'intt8' is not in the comparison, which has float, int8 .*'int8'"):
        judge_accuracy(compared(), candidate="intt8", max_drop=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AccuracyConfig, r"give max_drop or min_accuracy \(or both\)"),
        (QualityConfig, r"give max_drop or min_value or max_value \(or several\)"),
        (SizeConfig, r"give max_ratio or max_bytes \(or both\)"),
        (LatencyConfig, r"give max_ms or max_ratio \(or both\)"),
    ],
)
def test_a_gate_without_a_limit_is_a_mistake(config: type, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(candidate="int8")


@pytest.mark.parametrize(
    ("gate", "options"),
    [
        (gate_accuracy, {"max_drop": -0.1}),
        (gate_accuracy, {"max_drop": 30}),
        (gate_accuracy, {"min_accuracy": 99}),
        (gate_quality, {"max_drop": -0.1}),
        (gate_quality, {"max_drop": 0.1, "metric": ""}),
        (gate_quality, {"min_value": "0.9"}),
        (gate_size, {"max_ratio": 0}),
        (gate_size, {"max_bytes": 0}),
        (gate_latency, {"max_ms": 0}),
        (gate_latency, {"max_ms": 1, "threads": "two"}),
        (gate_latency, {"max_ms": 1, "batch_size": 0}),
    ],
)
def test_limits_out_of_range_are_mistakes(gate, options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        gate.config_type.model_validate_json(json.dumps({"candidate": "int8"} | options), strict=True)


def test_a_verdict_is_saved_and_loaded(tmp_path: Path) -> None:
    verdict = judge_accuracy(compared(), max_drop=0.003, min_accuracy=0.9)
    verdict.save(tmp_path)
    assert Verdict.load(tmp_path) == verdict


def test_they_are_gates() -> None:
    assert all(gate.is_gate for gate in (gate_accuracy, gate_quality, gate_size, gate_latency))
