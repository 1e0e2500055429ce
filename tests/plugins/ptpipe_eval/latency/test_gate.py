from __future__ import annotations

from pathlib import Path

import pytest

from ptpipe import Context, Decision, Verdict
from ptpipe_eval import Comparison, Latency, Row, gate_latency
from ptpipe_eval.config import LatencyConfig

from ....latencies import latency

PASSED, REFUSED, UNDECIDED = Decision.PASSED, Decision.REFUSED, Decision.UNDECIDED
UNKNOWN = {"low_ms": None, "high_ms": None, "ratio_low": None, "ratio_high": None, "speed": "unmeasurable"}


def judge(candidate: str = "int8", cells: tuple[Latency, ...] | None = None, **limits: object) -> Verdict:
    rows = (
        Row("float", "torch float32", 400_000, {}, (latency(1, 0.24), latency(32, 4.0))),
        Row("int8", "onnx int8", 100_000, {}, cells or (latency(1, 0.13, 0.54), latency(32, 2.5, 0.62))),
        Row("untimed", "onnx int8", 100_000, {}),
    )
    comparison = Comparison("mnist", "test", 100, (), "float", rows, "by hand", "2026-01-02T03:04:05+00:00")
    ctx = Context("gate", "gate.latency", 7, Path(), {"comparison": ("compare",)})
    return gate_latency(LatencyConfig(candidate=candidate, **limits), ctx, comparison)


@pytest.mark.parametrize(
    ("max_ratio", "decision"),
    [(0.56, PASSED), (0.551, PASSED), (0.55, UNDECIDED), (0.5292, UNDECIDED), (0.529, REFUSED)],
)
def test_the_interval_of_the_ratio_decides(max_ratio: float, decision: Decision) -> None:
    """It is 0.5292 to 0.5508."""
    assert judge(max_ratio=max_ratio).decision is decision


@pytest.mark.parametrize(("max_ms", "decision"), [(2.6, PASSED), (2.5, UNDECIDED), (2.4, REFUSED)])
def test_the_interval_of_the_median_decides(max_ms: float, decision: Decision) -> None:
    assert judge(max_ms=max_ms, batch_size=32).decision is decision


def test_the_reason_has_the_numbers() -> None:
    assert judge(max_ratio=0.5).reason == (
        "batch 1, one thread: int8 takes 0.54x (0.529 to 0.551) the time of float, allowed 0.5x"
    )
    assert judge(max_ms=2, batch_size=32).reason == (
        "batch 32, one thread: int8 takes 2.5 ms (2.45 to 2.55), allowed 2 ms"
    )
    assert judge(max_ratio=0.54).reason.endswith(
        "allowed 0.54x; the limit is inside the interval, a longer budget_s of the comparison narrows it"
    )


def test_the_worst_of_two_limits_decides() -> None:
    assert judge(max_ratio=0.6, max_ms=0.2).decision is PASSED
    assert judge(max_ratio=0.54, max_ms=0.2).decision is UNDECIDED
    refused = judge(max_ratio=0.54, max_ms=0.1)
    assert refused.decision is REFUSED and "0.54x" not in refused.reason
    assert refused.facts == {
        "candidate": "int8",
        "baseline": "float",
        "batch_size": 1,
        "threads": "one",
        "median_ms": 0.13,
        "bound_ms": None,
        "ratio": 0.54,
        "ratio_low": pytest.approx(0.5292),
        "ratio_high": pytest.approx(0.5508),
        "max_ms": 0.1,
        "max_ratio": 0.54,
    }


def test_an_unmeasurable_latency_decides_nothing() -> None:
    verdict = judge(cells=(latency(1, 0.13, 0.1, **UNKNOWN),), max_ratio=0.5, max_ms=100)
    assert verdict.decision is UNDECIDED
    busy = "the machine was too busy to tell, measure again (--fresh compare)"
    assert verdict.reason == (
        f"batch 1, one thread: int8 takes 0.1x the time of float, allowed 0.5x; {busy}; "
        f"batch 1, one thread: int8 takes 0.13 ms, allowed 100 ms; {busy}"
    )


def test_a_busy_machine_only_slows_down() -> None:
    busy = (latency(1, 0.13, 0.1, bound_ms=0.9, **UNKNOWN),)
    passed = judge(cells=busy, max_ms=0.9)
    assert passed.decision is PASSED
    assert passed.reason == (
        "batch 1, one thread: int8 takes at most 0.9 ms, on a machine that was busy, allowed 0.9 ms"
    )
    assert judge(cells=busy, max_ms=0.89).decision is UNDECIDED
    assert judge(cells=busy, max_ms=0.9, max_ratio=0.5).decision is UNDECIDED  # the baseline may be slowed down more


@pytest.mark.parametrize(
    ("option", "limits", "fails"),
    [
        ("estimate", {"max_ratio": 0.54}, False),  # the estimate is the limit
        ("estimate", {"max_ratio": 0.535}, True),
        ("estimate", {"max_ratio": 0.55, "max_ms": 0.129}, True),
        ("estimate", {"max_ms": 0.131}, False),
        ("warn", {"max_ratio": 0.535}, False),
        ("fail", {"max_ratio": 0.55}, True),
    ],
)
def test_what_an_undecided_gate_does(option: str, limits: dict[str, float], fails: bool) -> None:
    verdict = judge(on_inconclusive=option, **limits)
    assert (verdict.decision, verdict.fail_undecided) == (UNDECIDED, fails)


@pytest.mark.parametrize(("told", "fails"), [({}, True), ({"on_inconclusive": "warn"}, False)])
def test_a_missing_latency_decides_nothing(told: dict[str, str], fails: bool) -> None:
    verdict = judge(max_ms=1, threads="all", **told)
    assert (verdict.decision, verdict.fail_undecided) == (UNDECIDED, fails)
    assert verdict.reason == (
        "int8 was not measured at batch 1, all threads; the comparison has: batch 1, one thread; batch 32, one thread"
    )
    assert judge("untimed", max_ms=1).reason.endswith("the comparison has: no latency")
