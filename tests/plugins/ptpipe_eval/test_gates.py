from __future__ import annotations

import json
from pathlib import Path

import pytest
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


def judge_size(comparison: Comparison, **limits: float) -> Verdict:
    return gate_size(SizeConfig(candidate="int8", **limits), CTX, comparison)


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
        gate_size(SizeConfig(candidate="intt8", max_ratio=0.1), CTX, compared())


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
        (gate_accuracy, {"max_drop": 0.1, "confidence": 0.5}),
        (gate_accuracy, {"max_drop": 0.1, "confidence": 1}),
        (gate_quality, {"max_drop": 0.1, "on_inconclusive": "pass"}),
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
    verdict = judge_size(compared(), max_ratio=0.27, max_bytes=10)
    verdict.save(tmp_path)
    assert Verdict.load(tmp_path) == verdict


def test_they_are_gates() -> None:
    assert all(gate.is_gate for gate in (gate_accuracy, gate_quality, gate_size, gate_latency))
