"""A verdict, the core's own artifact."""

from __future__ import annotations

import pytest

from ptpipe import Artifact, Decision, Verdict


@pytest.mark.parametrize("decision", Decision)
def test_a_verdict_comes_back_from_its_folder(tmp_path, decision):
    verdict = Verdict(decision, "0.98 ≥ 0.97", {"drop": 0.01, "rows": [1, 2]}, fail_undecided=True)
    verdict.save(tmp_path)
    assert Verdict.load(tmp_path) == verdict
    assert Verdict.load(tmp_path).decision is decision


def test_facts_stand_beside_the_decision_and_do_not_replace_it():
    verdict = Verdict(Decision.REFUSED, "too slow", {"decision": "passed", "latency_ms": 3})
    assert verdict.summary() == {
        "decision": "refused",
        "reason": "too slow",
        "latency_ms": 3,
        "fail_undecided": False,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decision": "passed"}, "a verdict's decision is a Decision, not 'passed'"),
        ({"reason": None}, "a verdict's reason is a str, not None"),
        ({"facts": [1]}, r"a verdict's facts is a Mapping, not \[1\]"),
        ({"fail_undecided": "no"}, "a verdict's fail_undecided is a bool, not 'no'"),
    ],
)
def test_a_verdict_of_other_types_is_refused_where_it_is_made(given, message):
    with pytest.raises(TypeError, match=message):
        Verdict(**{"decision": Decision.PASSED, "reason": "good", **given})


def test_an_artifact_must_save_and_load():
    class Half(Artifact):
        def save(self, folder):
            pass

    with pytest.raises(TypeError, match="load"):
        Half()
