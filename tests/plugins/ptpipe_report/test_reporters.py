from __future__ import annotations

import subprocess
import sys

import ptpipe_report
from ptpipe import Reporter
from ptpipe.events import Notice


def test_importing_the_package_imports_neither_rich_nor_torch() -> None:
    code = (
        "import sys, ptpipe_report; ptpipe_report.ptpipe_reporters(); "
        "print([name for name in ('rich', 'torch', 'numpy', 'ptpipe_report.screen') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_every_run_gets_new_reporters() -> None:
    first, second = list(ptpipe_report.ptpipe_reporters()), list(ptpipe_report.ptpipe_reporters())
    files = ["HtmlReport", "MarkdownReport", "JsonLines", "VerdictReport", "JUnitReport", "SarifReport"]
    assert [type(each).__name__ for each in first] == [*files, "ConsoleReporter", "GitHubAnnotations", "GitHubSummary"]
    assert not {id(reporter) for reporter in first} & {id(reporter) for reporter in second}
    assert all(isinstance(reporter, Reporter) for reporter in first)


def test_events_before_the_start_of_a_run_are_ignored(script, tmp_path) -> None:
    for reporter in ptpipe_report.ptpipe_reporters():
        reporter.event(Notice("", "too early"))
        reporter.stage_finished(script.mnist()[0])
        reporter.run_finished(script.ended(script.mnist()))
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_exactly_its_files(script, tmp_path, capsys) -> None:
    script.play(list(ptpipe_report.ptpipe_reporters()), script.mnist())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events.jsonl",
        "junit.xml",
        "report.html",
        "report.md",
        "report.sarif",
        "verdict.json",
    ]
    assert capsys.readouterr().out == "", "results go to stdout through the command line alone"
