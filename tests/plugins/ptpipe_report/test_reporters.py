from __future__ import annotations

import subprocess
import sys

import ptpipe_report
from ptpipe import Reporter
from ptpipe.events import Notice


def test_importing_it_brings_neither_rich_nor_torch() -> None:
    code = (
        "import sys, ptpipe_report; ptpipe_report.ptpipe_reporters(); "
        "print([name for name in ('rich', 'torch', 'numpy', 'ptpipe_report.screen') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "[]"


def test_every_run_gets_observers_of_its_own() -> None:
    first, second = list(ptpipe_report.ptpipe_reporters()), list(ptpipe_report.ptpipe_reporters())
    assert [type(reporter).__name__ for reporter in first] == ["ConsoleReporter", "MarkdownReport", "JsonLines"]
    assert not {id(reporter) for reporter in first} & {id(reporter) for reporter in second}
    assert all(isinstance(reporter, Reporter) for reporter in first)


def test_news_before_the_start_of_a_run_are_passed_over(story, tmp_path) -> None:
    for reporter in ptpipe_report.ptpipe_reporters():
        reporter.event(Notice("", "too early"))
        reporter.stage_finished(story.mnist()[0])
        reporter.run_finished(story.ended(story.mnist()))
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_exactly_its_two_files(story, tmp_path, capsys) -> None:
    story.play(list(ptpipe_report.ptpipe_reporters()), story.mnist())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report.md"]
    assert capsys.readouterr().out == "", "results go to stdout through the command line alone"
