from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import Outcome
from ptpipe_report import GitHubAnnotations, GitHubSummary, github
from ptpipe_report.github import append_summary, fitting, workflow_commands
from ptpipe_report.markdown import report

from .strange_runs import runs

COMMAND = re.compile(r"::(error|warning) file=([^,:]*),line=(\d+),col=(\d+),title=([^,:]*)::(.*)")
AT = datetime(2026, 7, 1, 12, 0, 3, tzinfo=UTC)


@pytest.fixture
def gates(script, verdict):
    failing = verdict("undecided", "too few samples")
    failing["output"]["summary"]["fail_undecided"] = True
    return [
        *script.mnist(),
        script.stage("slow", "gate.latency", outputs=verdict("undecided", "50 %: a, b")),
        script.stage("worse", "gate.quality", Outcome.UNDECIDED, outputs=failing),
        script.stage("big", "gate.size", Outcome.REFUSED, outputs=verdict("refused", "29.3 %")),
        script.stage("onnx", "export.onnx", Outcome.FAILED, message="no such operator"),
    ]


@given(runs())
def test_every_annotation_is_one_command(run) -> None:
    for line in workflow_commands(*run):
        assert COMMAND.fullmatch(line), line
        assert line.isprintable()
        assert not re.search(r"%(?!25|3A|2C)", line)


def test_annotations_are_at_the_stages_of_the_manifest(script, gates, monkeypatch, capsys) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    script.manifest_path = "manifests/100%,a:b.yaml"
    script.play([GitHubAnnotations()], gates, exit_code=1)
    out, err = capsys.readouterr()
    start = "file=manifests/100%25%2Ca%3Ab.yaml"
    assert err.splitlines() == [
        f"::error {start},line=17,col=3,title=onnx failed::no such operator",
        f"::error {start},line=15,col=3,title=worse undecided::too few samples",
        f"::error {start},line=16,col=3,title=big refused::29.3 %25",
        f"::warning {start},line=14,col=3,title=slow undecided::50 %25: a, b",
    ]
    assert out == "", "stdout is for results"


@pytest.mark.parametrize(("value", "verbosity"), [("false", 0), ("", 0), (None, 0), ("true", -2)])
def test_elsewhere_there_are_none(script, gates, monkeypatch, capsys, value, verbosity) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("GITHUB_ACTIONS", value)
    script.verbosity = verbosity
    script.play([GitHubAnnotations()], gates, exit_code=1)
    assert capsys.readouterr() == ("", "")


def test_the_summary_is_the_report(script, tmp_path, monkeypatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("# Before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    script.play([GitHubSummary()], script.mnist())
    expected = report(script.started(script.mnist()), script.ended(script.mnist()), [], AT)
    without_time = re.compile(r"^\| finished .*$", re.MULTILINE)
    assert without_time.sub("", summary.read_text()) == without_time.sub("", f"# Before\n{expected}\n")


@pytest.mark.parametrize(("name", "verbosity"), [("", 0), ("summary.md", -2)])
def test_where_no_summary_is_asked_for_or_the_caller_reports_none_is_written(
    script, tmp_path, monkeypatch, name, verbosity
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", name and str(tmp_path / name))
    script.verbosity = verbosity
    script.play([GitHubSummary()], script.mnist())
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.text(st.characters(categories=None), max_size=60), min_size=1, max_size=6), st.integers(0, 400))
def test_a_long_summary_ends_after_a_whole_section(sections, room) -> None:
    text = fitting(sections, room)
    assert len(text) <= room
    encoded = [section.encode("utf-8", "backslashreplace") for section in sections]
    if text and text != b"\n\n".join(encoded) + b"\n\n":
        kept = text.removesuffix(b"\n\n").split(b"**Truncated:**")[0].removesuffix(b"\n\n")
        assert any(kept == b"\n\n".join(encoded[:n]) for n in range(len(sections)))
        assert text.endswith(b"the whole report is `report.md` in the run's folder.\n\n")


def test_what_a_step_adds_stays_below_the_limit_of_all_that_it_adds(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(github, "MAX_SUMMARY_BYTES", 1000)
    path = tmp_path / "summary.md"
    for _ in range(9):
        append_summary(path, ["# a run", "x" * 200, "y" * 200])
    text = path.read_text()
    assert (text.count("y" * 200), text.count("Truncated")) == (2, text.count("# a run") - 2)
    assert text.count("# a run") > 2
    assert path.stat().st_size <= 1000


def test_a_summary_that_cannot_be_written_raises(script, tmp_path, monkeypatch) -> None:
    """The run reports a reporter that raises, and goes on: tests/ptpipe/execution/test_reporters.py."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "summary.md"))
    with pytest.raises(FileNotFoundError):
        script.play([GitHubSummary()], script.mnist())
