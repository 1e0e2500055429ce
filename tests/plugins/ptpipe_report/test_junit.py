"""The structure is checked as Ant's `JUnit.xsd` and Jenkins' `junit-10.xsd` define it, each in its stricter points."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest
from hypothesis import given

from ptpipe import Outcome
from ptpipe_report import JUnitReport
from ptpipe_report.junit import junit_xml
from ptpipe_report.run_summary import stage_figures

from .strange_runs import runs

AT = datetime(2026, 7, 1, 12, 0, 3, tzinfo=UTC)
SUITE = ("properties", "testcase", "system-out", "system-err")
SUITE_ATTRIBUTES = {"id", "name", "package", "timestamp", "hostname", "tests", "failures", "errors", "skipped", "time"}
CHILDREN = {"testsuites": {"testsuite"}, "properties": {"property"}, "testcase": {"skipped", "error", "failure"}}
ATTRIBUTES = {
    "property": {"name", "value"},
    "testcase": {"classname", "name", "time"},
    "skipped": {"message"},
    "error": {"type", "message"},
    "failure": {"type", "message"},
}


def check(root: ElementTree.Element) -> None:
    assert root.tag == "testsuites" and len(root) == 1
    suite = root[0]
    tags = [child.tag for child in suite]
    assert tags == sorted(tags, key=SUITE.index)
    assert all(tags.count(tag) == 1 for tag in SUITE if tag != "testcase")
    assert suite.attrib.keys() == SUITE_ATTRIBUTES
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp"))
    for element in root.iter():
        if element is not suite:
            assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
            assert element.attrib.keys() == ATTRIBUTES.get(element.tag, set())
        if "time" in element.attrib:
            assert re.fullmatch(r"\d+\.\d+", element.get("time"))
    cases = suite.findall("testcase")
    assert all(len(case) <= 1 for case in cases)
    assert int(suite.get("tests")) == len(cases)
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    assert all(int(suite.get(name)) == len(suite.findall(f"testcase/{tag}")) for name, tag in counts.items())


def read(script, tmp_path, stages, **ending) -> ElementTree.Element:
    script.play([JUnitReport()], stages, **ending)
    root = ElementTree.fromstring((tmp_path / "junit.xml").read_bytes())
    check(root)
    return root


@given(runs())
def test_whatever_a_run_has_in_it_is_xml_of_the_known_structure(run) -> None:
    root = ElementTree.fromstring(junit_xml(*run, AT))
    check(root)
    num_errors = len(root.findall(".//error"))
    assert num_errors >= sum(stage.outcome is Outcome.FAILED for stage in run[1].stages)
    looks_passed = num_errors == 0 and root.find(".//failure") is None
    assert run[1].exit_code == 0 or not looks_passed


def test_each_gate_and_each_stage_that_did_not_finish_is_a_case(script, tmp_path, delivered, verdict) -> None:
    refused, undecided, failing = (verdict(d, f"the reason: {d}") for d in ("refused", "undecided", "undecided"))
    failing["output"]["summary"]["fail_undecided"] = True
    refused["output"]["summary"]["drop"] = 0.5
    stages = [
        *delivered,
        script.stage("big", "gate.size", Outcome.REFUSED, seconds=0.25, outputs=refused),
        script.stage("slow", "gate.latency", outputs=undecided),
        script.stage("worse", "gate.quality", Outcome.UNDECIDED, outputs=failing),
        script.stage("broken", "export.onnx", Outcome.FAILED, message="no such operator", frames=("a.py:1 in f",)),
        script.stage("late", "gate.size", Outcome.SKIPPED, message="needs broken"),
    ]
    root = read(script, tmp_path, stages, exit_code=1)
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert list(cases) == ["gate", "big", "slow", "worse", "broken", "late"]
    assert [[child.tag for child in case] for case in cases.values()] == [
        [], ["failure"], ["skipped"], ["failure"], ["error"], ["skipped"],
    ]  # fmt: skip
    assert cases["big"].attrib == {"classname": "mnist-qat.gate.size", "name": "big", "time": "0.250"}
    assert cases["big"][0].attrib == {"type": "refused", "message": "the reason: refused"}
    assert cases["big"][0].text == "the reason: refused\nat manifests/mnist_qat.yaml:14:3\ndrop: 0.5"
    assert cases["slow"][0].get("message") == "undecided: the reason: undecided"
    assert cases["worse"][0].get("type") == "undecided"
    assert cases["broken"][0].text == "no such operator\na.py:1 in f"
    assert cases["late"][0].get("message") == "needs broken"
    assert root.find(".//system-out").text.splitlines() == [
        "gate passed: onnx loses 0.30 points (at most 0.30)",
        "big refused: the reason: refused",
        "slow undecided: the reason: undecided",
        "worse undecided: the reason: undecided",
        "deliverable: pretrain/model.onnx",
        "deliverable: pretrain/odd*name.data",
    ]


def test_gates_with_several_verdicts_have_several_cases(script, tmp_path, verdict) -> None:
    outputs = {"accuracy": verdict("passed", "a")["output"], "size": verdict("refused", "b")["output"]}
    root = read(script, tmp_path, [script.stage("both", "gate.both", Outcome.REFUSED, outputs=outputs)], exit_code=3)
    assert [case.get("name") for case in root.iter("testcase")] == ["both.accuracy", "both.size"]


@pytest.mark.parametrize(("code", "word"), [(70, "bug"), (130, "interrupted")])
def test_a_run_that_ended_between_its_stages_does_not_look_passed(script, tmp_path, code, word) -> None:
    stages = [script.stage("a", "k.k"), script.stage("b", "k.k", Outcome.SKIPPED, message="the run was interrupted")]
    root = read(script, tmp_path, stages, exit_code=code, interrupted=code == 130)
    assert [error.get("type") for error in root.iter("error")] == [word]


def test_a_gate_of_a_type_of_its_own_is_a_gate(script, tmp_path, verdict) -> None:
    outputs = verdict("refused", "why")
    outputs["output"]["type"] = "toy.Strict"
    root = read(script, tmp_path, [script.stage("g", "toy.gate", Outcome.REFUSED, outputs=outputs)], exit_code=3)
    assert [failure.get("message") for failure in root.iter("failure")] == ["why"]
    assert [str(each) for each in stage_figures(script.stage("g", "toy.gate", outputs=outputs))] == ["refused"]
