"""Observers hear everything, and none of them can break a run or another's hearing."""

from __future__ import annotations

import types
from dataclasses import dataclass

import pluggy
import pytest

from ptpipe import Observer, hookimpl, hookspecs
from ptpipe.events import LogLine, Notice, RunFinished, RunStarted, StageFinished, StageStarted
from ptpipe.news import News


class Ear(Observer):
    """Remembers what it hears; raises where it is told to."""

    def __init__(self, deaf_to=(), error=None):
        self.heard, self.deaf_to, self.error = [], deaf_to, error or ValueError("no")

    def _hear(self, what, news):
        self.heard.append((what, news))
        if what in self.deaf_to:
            raise self.error

    def run_started(self, news):
        self._hear("run_started", news)

    def stage_started(self, news):
        self._hear("stage_started", news)

    def event(self, event):
        self._hear("event", event)

    def stage_finished(self, news):
        self._hear("stage_finished", news)

    def run_finished(self, news):
        self._hear("run_finished", news)

    @property
    def whats(self):
        return [what for what, _ in self.heard]


def manager_with(*plugins):
    manager = pluggy.PluginManager("ptpipe")
    manager.add_hookspecs(hookspecs)
    for number, plugin in enumerate(plugins):
        manager.register(plugin, f"plugin{number}")
    return manager


def plugin_with(ear):
    """A module that hears through hooks."""
    module = types.ModuleType("some_plugin")

    @hookimpl
    def ptpipe_run_started(news):
        ear.run_started(news)

    @hookimpl
    def ptpipe_stage_started(news):
        ear.stage_started(news)

    @hookimpl
    def ptpipe_event(event):
        ear.event(event)

    @hookimpl
    def ptpipe_stage_finished():  # a hook may take less than is given
        ear.stage_finished(None)

    @hookimpl
    def ptpipe_run_finished(news):
        ear.run_finished(news)

    for function in (
        ptpipe_run_started,
        ptpipe_stage_started,
        ptpipe_event,
        ptpipe_stage_finished,
        ptpipe_run_finished,
    ):
        setattr(module, function.__name__, function)
    return module


def tell_all(news):
    for what in ("run_started", "stage_started", "event", "stage_finished", "run_finished"):
        getattr(news, what)(what)


ALL = ["run_started", "stage_started", "event", "stage_finished", "run_finished"]


def test_everybody_hears_everything():
    ear, through_hooks = Ear(), Ear()
    tell_all(News([ear], manager_with(plugin_with(through_hooks)), lambda line: None))
    assert ear.heard == [(what, what) for what in ALL]
    assert through_hooks.whats == ALL


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(0), RecursionError()])
@pytest.mark.parametrize("what", ALL)
def test_one_that_raises_is_named_once_and_switched_off(what, error):
    broken, whole, log = Ear([what], error), Ear(), []
    news = News([broken, whole], manager_with(), log.append)
    tell_all(news)
    tell_all(news)
    assert broken.whats == ALL[: ALL.index(what) + 1]
    notices = [event for kind, event in whole.heard if kind == "event" and isinstance(event, Notice)]
    (notice,) = notices
    assert notice.text.startswith("observer ")
    assert "Ear raised " in notice.text
    assert notice.text.endswith(" and is switched off for this run")
    assert [what for what in whole.whats if what != "event"] == [what for what in ALL if what != "event"] * 2
    (line,) = log
    assert isinstance(line, LogLine)
    assert "Traceback" in line.text


def test_a_plugin_that_raises_is_named():
    whole = Ear()
    news = News([whole], manager_with(plugin_with(Ear(["event"]))), lambda line: None)
    tell_all(news)
    assert whole.heard[3][1].text == "observer plugin0 raised ValueError('no') and is switched off for this run"


def test_observers_that_break_at_the_news_of_a_broken_one():
    first, second, third = Ear(["run_started", "event"]), Ear(["run_started", "event"]), Ear()
    tell_all(News([first, second, third], manager_with(), lambda line: None))
    assert first.whats == ["run_started"]
    assert second.whats == ["event"], "told of the first, it broke; told nothing since"
    assert third.whats[:3] == ["event", "event", "run_started"]


@dataclass
class Equal(Observer):
    """Equal to every other of its kind."""

    number: int = 0

    def __post_init__(self):
        self.heard = []

    def run_started(self, news):
        self.heard.append(news)
        if news == "break the second" and self.breaks:
            raise ValueError


def test_observers_are_told_apart_by_who_they_are():
    first, second = Equal(), Equal()
    first.breaks, second.breaks = False, True
    news = News([first, second], manager_with(), lambda line: None)
    news.run_started("break the second")
    news.run_started("again")
    assert (first.heard, second.heard) == (["break the second", "again"], ["break the second"])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_is_not_swallowed(interrupt):
    with pytest.raises(interrupt):
        News([Ear(["event"], interrupt())], manager_with(), lambda line: None).event("x")


def test_an_observer_hears_nothing_it_does_not_ask_for(tmp_path):
    silent = Observer()
    assert silent.run_started(RunStarted("r", "n", "m", tmp_path, (), 0)) is None
    assert silent.stage_started(StageStarted("s", "a.b", 1, 1)) is None
    assert silent.event(Notice("s", "x")) is None
    assert silent.stage_finished(StageFinished("s", "a.b", "done", 0.0, "")) is None
    assert silent.run_finished(RunFinished("r", "n", tmp_path, 0, 0.0, ())) is None
