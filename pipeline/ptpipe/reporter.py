"""The face of everything that is told about a run and can't change it."""

from __future__ import annotations

from ptpipe.events import Event, RunFinished, RunStarted, StageFinished, StageStarted


class Reporter:
    """Override what you want to hear. One that raises is named once and not told again in that run."""

    def run_started(self, event: RunStarted) -> None:
        """A run begins."""

    def stage_started(self, event: StageStarted) -> None:
        """A stage begins."""

    def event(self, event: Event) -> None:
        """A stage says something while it works."""

    def stage_finished(self, event: StageFinished) -> None:
        """A stage ended; exactly once for each."""

    def run_finished(self, event: RunFinished) -> None:
        """The run ended; always told."""
