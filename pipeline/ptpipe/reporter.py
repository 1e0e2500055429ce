"""The interface of reporters: consoles, report writers, trackers."""

from __future__ import annotations

from typing import ClassVar

from ptpipe.events import Event, RunFinished, RunStarted, StageFinished, StageStarted


class Reporter:
    """Receives the events of a run, in the main process only; it can change nothing. Override what you need.

    A reporter that raises is reported once and switched off for the rest of the run.
    """

    is_screen: ClassVar[bool] = False
    """Whether the user follows the run by it: if such a reporter raises, stderr has a line that says so."""

    def run_started(self, event: RunStarted) -> None:
        """A run begins: `event.folder` is where reports go."""

    def stage_started(self, event: StageStarted) -> None:
        """A stage, `event.stage_id`, is about to be executed or taken from the store."""

    def event(self, event: Event) -> None:
        """A stage reports progress, a metric, a notice, a log line or an attachment."""

    def stage_finished(self, event: StageFinished) -> None:
        """A stage ended, whatever its outcome (`event.outcome`); called exactly once per stage."""

    def run_finished(self, event: RunFinished) -> None:
        """The run ended; always called, also after Ctrl-C. `event.stages`: how each stage ended."""
