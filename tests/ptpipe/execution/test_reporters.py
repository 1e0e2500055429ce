"""Reporters hear everything, and none of them can break a run or another's hearing."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from ptpipe import Reporter
from ptpipe.events import LogLine, Notice, RunFinished, RunStarted, StageFinished, StageStarted
from ptpipe.execution.reporters import ReporterGroup


class Ear(Reporter):
    """Remembers what it hears; raises where it is told to."""

    def __init__(self, deaf_to=(), error=None):
        self.heard, self.deaf_to, self.error = [], deaf_to, error or ValueError("no")

    def _hear(self, what, event):
        self.heard.append((what, event))
        if what in self.deaf_to:
            raise self.error

    def run_started(self, event):
        self._hear("run_started", event)

    def stage_started(self, event):
        self._hear("stage_started", event)

    def event(self, event):
        self._hear("event", event)

    def stage_finished(self, event):
        self._hear("stage_finished", event)

    def run_finished(self, event):
        self._hear("run_finished", event)

    @property
    def whats(self):
        return [what for what, _ in self.heard]


def tell_all(event):
    for what in ("run_started", "stage_started", "event", "stage_finished", "run_finished"):
        getattr(event, what)(what)


ALL = ["run_started", "stage_started", "event", "stage_finished", "run_finished"]


def test_every_reporter_hears_everything():
    first, second = Ear(), Ear()
    tell_all(ReporterGroup([first, second], lambda line: None))
    assert first.heard == second.heard == [(what, what) for what in ALL]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(0), RecursionError()])
@pytest.mark.parametrize("what", ALL)
def test_one_that_raises_is_named_once_and_switched_off(what, error):
    broken, whole, log = Ear([what], error), Ear(), []
    event = ReporterGroup([broken, whole], log.append)
    tell_all(event)
    tell_all(event)
    assert broken.whats == ALL[: ALL.index(what) + 1]
    notices = [event for kind, event in whole.heard if kind == "event" and isinstance(event, Notice)]
    (notice,) = notices
    assert notice.text.startswith("reporter ")
    assert "Ear raised " in notice.text
    assert notice.text.endswith(" and is switched off for this run")
    assert [what for what in whole.whats if what != "event"] == [what for what in ALL if what != "event"] * 2
    (line,) = log
    assert isinstance(line, LogLine)
    assert "Traceback" in line.text


class Screen(Ear):
    is_screen = True


def test_the_end_of_what_the_user_looks_at_is_told_on_stderr(capsys):
    tell_all(ReporterGroup([Ear(["event"]), Ear()], lambda line: None))
    assert capsys.readouterr() == ("", ""), "others show the notice"
    tell_all(ReporterGroup([Screen(["event"], ValueError("\x1b[2J")), Ear()], lambda line: None))
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"reporter \S+Screen raised ValueError: \\x1b\[2J .* and is switched off for this run\n", err)


def test_reporters_that_break_at_the_report_of_a_broken_one():
    first, second, third = Ear(["run_started", "event"]), Ear(["run_started", "event"]), Ear()
    tell_all(ReporterGroup([first, second, third], lambda line: None))
    assert first.whats == ["run_started"]
    assert second.whats == ["event"], "told of the first, it broke; told nothing since"
    assert third.whats[:3] == ["event", "event", "run_started"]


@dataclass
class Equal(Reporter):
    """Equal to every other of its kind."""

    number: int = 0

    def __post_init__(self):
        self.heard = []

    def run_started(self, event):
        self.heard.append(event)
        if event == "break the second" and self.breaks:
            raise ValueError


def test_reporters_are_told_apart_by_who_they_are():
    first, second = Equal(), Equal()
    first.breaks, second.breaks = False, True
    event = ReporterGroup([first, second], lambda line: None)
    event.run_started("break the second")
    event.run_started("again")
    assert (first.heard, second.heard) == (["break the second", "again"], ["break the second"])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_is_not_swallowed(interrupt):
    with pytest.raises(interrupt):
        ReporterGroup([Ear(["event"], interrupt())], lambda line: None).event("x")


def test_a_reporter_hears_nothing_it_does_not_ask_for(tmp_path):
    silent = Reporter()
    assert silent.run_started(RunStarted("r", "n", "m", tmp_path, (), 0)) is None
    assert silent.stage_started(StageStarted("s", "a.b", 1, 1)) is None
    assert silent.event(Notice("s", "x")) is None
    assert silent.stage_finished(StageFinished("s", "a.b", "done", 0.0, "")) is None
    assert silent.run_finished(RunFinished("r", "n", tmp_path, 0, 0.0, ())) is None


def test_the_start_has_the_options_of_every_stage(project):
    project.write("one: {uses: toy.make, with: {value: 3}}\ntwo: {uses: toy.add, needs: {a: one, b: one}}")
    ear = Ear()
    project.run({"one.note": "n"}, reporters=[ear])
    (started,) = [event for what, event in ear.heard if what == "run_started"]
    assert started.options == {"one": {"value": 3.0, "note": "n", "mode": "plain"}, "two": {}}
