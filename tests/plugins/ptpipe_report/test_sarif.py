from __future__ import annotations

import json
from datetime import UTC, datetime
from urllib.parse import unquote

import pytest
from hypothesis import given

from ptpipe import Outcome
from ptpipe_report import SarifReport
from ptpipe_report.sarif import sarif_log

from .strange_runs import runs

AT = datetime(2026, 7, 1, 12, 0, 3, tzinfo=UTC)


def read(script, tmp_path, stages, **ending):
    script.play([SarifReport()], stages, **ending)
    log = json.loads((tmp_path / "report.sarif").read_text(), parse_constant=pytest.fail)
    (run,) = log["runs"]
    return run


def check(log) -> None:
    """What SARIF 2.1.0 and GitHub's code scanning require of what is used."""
    assert log["version"] == "2.1.0" and log["$schema"].startswith("https://")
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "ptpipe"
    ids = [rule["id"] for rule in rules]
    assert len(set(ids)) == len(ids)
    for rule in rules:
        assert all(rule[name]["text"] for name in ("shortDescription", "fullDescription", "help"))
    for result in run["results"]:
        assert result["ruleId"] in ids and result["level"] in ("error", "warning") and result["message"]["text"]
        (location,) = result["locations"]
        region = location["physicalLocation"]["region"]
        assert region["startLine"] == region["endLine"] >= 1
        assert 1 <= region["startColumn"] <= region["endColumn"]
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        assert uri.isascii() and uri.isprintable() and " " not in uri
        assert result["partialFingerprints"].keys() == {"primaryLocationLineHash"}


@given(runs())
def test_whatever_a_run_has_in_it_is_sarif(run) -> None:
    log = json.loads(json.dumps(sarif_log(*run, AT), allow_nan=False))
    check(log)
    num_failed = len([stage for stage in run[1].stages if stage.outcome is Outcome.FAILED])
    assert len(log["runs"][0]["results"]) >= num_failed


def test_gates_and_failures_point_at_the_manifest(script, tmp_path, verdict, monkeypatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "manifests").mkdir()
    monkeypatch.chdir(tmp_path / "manifests")
    script.manifest_path = "my model.yaml"
    stages = [
        *script.mnist(),
        script.stage("big", "gate.size", Outcome.REFUSED, outputs=verdict("refused", "29 % [a](b) {0}")),
        script.stage("slow", "gate.latency", outputs=verdict("undecided", "why")),
        script.stage("onnx", "export.onnx", Outcome.FAILED, message="no such operator"),
    ]
    run = read(script, tmp_path, stages, exit_code=1)
    assert [(each["ruleId"], each["level"], each["message"]["text"]) for each in run["results"]] == [
        ("gate.size", "error", "big refused: 29 % [a] (b) {{0}}"),
        ("gate.latency", "warning", "slow undecided: why"),
        ("export.onnx", "error", "onnx failed: no such operator"),
    ]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "manifests/my%20model.yaml", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 14, "startColumn": 3, "endLine": 14, "endColumn": 6}
    assert run["automationDetails"]["id"] == "ptpipe/mnist-qat/"
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 1)
    assert invocation["endTimeUtc"].endswith("Z") and invocation["startTimeUtc"].endswith("Z")


def test_an_interrupted_stage_is_a_result(script, tmp_path) -> None:
    stages = [script.stage("train", "k.k", Outcome.INTERRUPTED, message="interrupted")]
    (result,) = read(script, tmp_path, stages, exit_code=130)["results"]
    assert (result["level"], result["message"]["text"]) == ("error", "train was interrupted")


def test_a_refusal_is_no_failure_of_the_tool_and_a_passed_run_has_no_result(script, tmp_path) -> None:
    run = read(script, tmp_path, script.mnist())
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])
    assert read(script, tmp_path, script.mnist(), exit_code=3)["invocations"][0]["executionSuccessful"]


def test_an_alert_stays_the_same_where_the_stage_moves_in_the_file(script, verdict) -> None:
    def fingerprint(*stages):
        (run,) = sarif_log(script.started(stages), script.ended(stages, 3), AT)["runs"]
        return [result["partialFingerprints"] for result in run["results"]]

    first = script.stage("first", "gate.size", outputs=verdict("refused", "a"))
    second = script.stage("second", "gate.size", outputs=verdict("refused", "a"))
    assert fingerprint(first, second) == fingerprint(second, first)[::-1]
    assert len({str(each) for each in fingerprint(first, second)}) == 2


def test_a_manifest_outside_of_any_repository_has_an_absolute_address(script, tmp_path, verdict, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    script.manifest_path = str(tmp_path / "é.yaml")
    run = read(script, tmp_path, [script.stage("g", "gate.size", outputs=verdict("refused", "a"))], exit_code=3)
    location = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert location.keys() == {"uri"} and unquote(location["uri"]) == f"file://{tmp_path}/é.yaml"
