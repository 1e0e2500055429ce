"""The base of reporters that report once, at the end of a run."""

from __future__ import annotations

from ptpipe import Event, Notice, Reporter, RunFinished, RunStarted


class EndReporter(Reporter):
    """Reports once, when a run has ended, whatever its outcome."""

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self.notices: list[Notice] = []

    def run_started(self, event: RunStarted) -> None:
        """Keep what RunFinished does not have: the manifest's path, overrides, seed."""
        self._started = event

    def event(self, event: Event) -> None:
        """Keep the run's own notices; a stage's notices are in its StageFinished."""
        if isinstance(event, Notice) and not event.stage_id:
            self.notices.append(event)

    def run_finished(self, event: RunFinished) -> None:
        """Report."""
        if self._started is not None:
            self.report(self._started, event)

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        """Report the run."""
        raise NotImplementedError
