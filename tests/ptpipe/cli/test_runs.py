"""`ptpipe runs` of records that are not written by a run here."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from ptpipe import UsageError
from ptpipe.cli.record_facts import options, primary_metrics, verdicts, written_options
from ptpipe.cli.runs import runs


@pytest.fixture
def two_runs(project):
    """Two runs of one manifest, the second with an override."""
    project.write("one: {uses: toy.make, with: {value: 3}}\ngate: {uses: toy.gate, with: {least: 5}}")
    return [project.run(), project.run({"gate.least": 2})]


def call(project, *arguments):
    result = CliRunner().invoke(runs, [*arguments, "--artifacts", str(project.artifacts)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_overrides_and_verdicts_are_columns(project, two_runs):
    head, newest, oldest = call(project).splitlines()
    assert re.split("  +", head)[3:] == ["gate verdict", "gate.least", "stages", "started (UTC)"]
    assert re.split("  +", newest)[3:5] == ["passed", "2"]
    assert re.split("  +", oldest)[3:5] == ["refused", "5"]  # its own option, which nothing overrides
    listed = json.loads(call(project, "--json", "--sort", "gate verdict"))
    assert [run["verdicts"] for run in listed] == [{"gate": "passed"}, {"gate": "refused"}]
    assert json.loads(call(project, "--json", "--sort", "gate.least"))[0]["overrides"] == {"gate.least": 2}


def test_the_other_formats(project, two_runs):
    assert call(project, "--md").startswith("| run | took | ended |")
    assert call(project, "--html").startswith("<!DOCTYPE html>")


def test_a_name_without_runs(project, two_runs):
    with pytest.raises(UsageError, match=r"no run under .* has the name 'tou' \(did you mean 'toy'\?\)"):
        call(project, "--name", "tou")


def record(**stage):
    return {"seed": 1, "overrides": {"a.x": 2}, "stages": [{"stage_id": "a", "outputs": {}, "parts": {}, **stage}]}


def test_what_a_record_says(project):
    summary = {"metrics": [{"name": "f1"}, {"name": "loss"}], "rows": [{"name": "int8", "metrics": {"f1": 0.5}}]}
    assert primary_metrics(record(outputs={"output": {"summary": summary}})) == {"int8.f1": 0.5}
    for strange in (None, 3, {}, {"rows": 3, "metrics": []}, {"rows": [3], "metrics": []}, {"decision": 3}):
        odd = record(outputs={"output": {"summary": strange}})
        assert (primary_metrics(odd), verdicts(odd)) == ({}, {})
    assert options(record(parts={"config": {"x": 2, "y": {"z": [1]}}})) == {"seed": 1, "a.x": 2, "a.y.z": [1]}
    (project.folder / "manifest.yaml").write_text(project.write("a: {uses: b.c, with: {y: {z: 1}}}").read_text())
    assert written_options(project.folder, record()) == {"seed", "a.x", "a.y.z"}
    assert written_options(project.folder / "gone", record()) == {"seed", "a.x"}
