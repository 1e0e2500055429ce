"""Reporters as a group: every event goes to all of them, and none can break the run."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Self

import pluggy

from ptpipe.events import Event, LogLine, Notice, RunFinished, RunStarted, StageFinished, StageStarted
from ptpipe.plan.frames import describe_error
from ptpipe.plan.vocabulary import call_each
from ptpipe.printable import one_line
from ptpipe.reporter import Reporter


class ReporterGroup(Reporter):
    """Passes every event on to all reporters; one that raises is named in the log once and switched off."""

    def __init__(self, reporters: Sequence[Reporter], log: Callable[[LogLine], None]) -> None:
        self._reporters = list(reporters)
        self._log = log
        self._missing: list[str] = []

    @classmethod
    def of_plugins(
        cls, manager: pluggy.PluginManager, further: Sequence[Reporter], log: Callable[[LogLine], None]
    ) -> Self:
        """Group the plugins' reporters and further ones, in that order."""
        results = list(call_each(manager, "ptpipe_reporters"))
        group = cls([*(item for result in results for item in result.items), *further], log)
        group._missing = [
            f"plugin {result.plugin} offers no reporter in this run: {result.error}"
            for result in results
            if result.error
        ]
        return group

    def report_missing(self) -> None:
        """Give a notice for each plugin whose hook failed."""
        for line in self._missing:
            self._log(LogLine("", line))
            self.event(Notice("", line))

    def run_started(self, event: RunStarted) -> None:
        self._each(lambda reporter: reporter.run_started(event))

    def stage_started(self, event: StageStarted) -> None:
        self._each(lambda reporter: reporter.stage_started(event))

    def event(self, event: Event) -> None:
        self._each(lambda reporter: reporter.event(event))

    def stage_finished(self, event: StageFinished) -> None:
        self._each(lambda reporter: reporter.stage_finished(event))

    def run_finished(self, event: RunFinished) -> None:
        self._each(lambda reporter: reporter.run_finished(event))

    def _each(self, call: Callable[[Reporter], None]) -> None:
        for reporter in list(self._reporters):
            if not any(reporter is other for other in self._reporters):
                continue  # switched off meanwhile
            try:
                call(reporter)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # reporting never breaks a run
                self._reporters = [other for other in self._reporters if other is not reporter]
                name = f"{type(reporter).__module__}.{type(reporter).__qualname__}"
                line = f"reporter {name} raised {describe_error(error)} and is switched off for this run"
                self._log(LogLine("", "".join(traceback.format_exception(error)) + line))
                if getattr(reporter, "is_screen", False):  # no other reporter shows the notice
                    with contextlib.suppress(OSError, ValueError):  # a closed stderr
                        print(one_line(line), file=sys.stderr)  # noqa: T201
                self.event(Notice("", line))
