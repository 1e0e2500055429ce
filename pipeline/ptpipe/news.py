"""Telling the observers, so that none of them can break a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import pluggy

from ptpipe.events import Event, LogLine, Notice, RunFinished, RunStarted, StageFinished, StageStarted
from ptpipe.observer import Observer

_NEWS = {f"ptpipe_{name}" for name in ("run_started", "stage_started", "event", "stage_finished", "run_finished")}


class _PluginHooks(Observer):
    """One plugin's news hooks in an observer's coat."""

    def __init__(self, manager: pluggy.PluginManager, plugin: object) -> None:
        others = [other for other in manager.get_plugins() if other is not plugin]
        self._callers = {name: manager.subset_hook_caller(name, others) for name in _NEWS}
        self.name = manager.get_name(plugin) or repr(plugin)

    def run_started(self, news: RunStarted) -> None:
        self._callers["ptpipe_run_started"](news=news)

    def stage_started(self, news: StageStarted) -> None:
        self._callers["ptpipe_stage_started"](news=news)

    def event(self, event: Event) -> None:
        self._callers["ptpipe_event"](event=event)

    def stage_finished(self, news: StageFinished) -> None:
        self._callers["ptpipe_stage_finished"](news=news)

    def run_finished(self, news: RunFinished) -> None:
        self._callers["ptpipe_run_finished"](news=news)


class News(Observer):
    """Passes news on to every observer; one that raises is named in the log once and switched off."""

    def __init__(
        self, observers: Sequence[Observer], manager: pluggy.PluginManager, log: Callable[[LogLine], None]
    ) -> None:
        listening = [plugin for _, plugin in manager.list_name_plugin() if _has_news_hooks(manager, plugin)]
        self._observers: list[Observer] = [*observers, *(_PluginHooks(manager, plugin) for plugin in listening)]
        self._log = log

    def run_started(self, news: RunStarted) -> None:
        self._each(lambda observer: observer.run_started(news))

    def stage_started(self, news: StageStarted) -> None:
        self._each(lambda observer: observer.stage_started(news))

    def event(self, event: Event) -> None:
        self._each(lambda observer: observer.event(event))

    def stage_finished(self, news: StageFinished) -> None:
        self._each(lambda observer: observer.stage_finished(news))

    def run_finished(self, news: RunFinished) -> None:
        self._each(lambda observer: observer.run_finished(news))

    def _each(self, tell: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            if not any(observer is other for other in self._observers):
                continue  # switched off while the others were told that one of them is
            try:
                tell(observer)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # news never breaks a run
                self._observers = [other for other in self._observers if other is not observer]
                line = f"observer {_name(observer)} raised {error!r} and is switched off for this run"
                self._log(LogLine("", "".join(traceback.format_exception(error)) + line))
                self.event(Notice("", line))


def _name(observer: Observer) -> str:
    if isinstance(observer, _PluginHooks):
        return observer.name
    return f"{type(observer).__module__}.{type(observer).__qualname__}"


def _has_news_hooks(manager: pluggy.PluginManager, plugin: object) -> bool:
    return any(caller.name in _NEWS for caller in manager.get_hookcallers(plugin) or [])
