"""`report.html`, a run's report as one file that opens from disk: see `docs/report.md`."""

from __future__ import annotations

from ptpipe import Notice, Reporter, RunFinished, RunStarted, StageStarted, write_atomically

__all__ = ["FILE_NAME", "HtmlReport"]

FILE_NAME = "report.html"


class HtmlReport(Reporter):
    """Write `report.html` into the run's folder when the run has ended, whatever its outcome."""

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self._running = ""
        self._notices: list[Notice] = []

    def run_started(self, event: RunStarted) -> None:
        """Keep what RunFinished does not have."""
        self._started = event

    def stage_started(self, event: StageStarted) -> None:
        """Keep which stage is running."""
        self._running = event.stage_id

    def event(self, event: object) -> None:
        """Keep the run's own notices; a stage's notices are in its StageFinished."""
        if isinstance(event, Notice) and not event.stage_id:
            self._notices.append(event)

    def run_finished(self, event: RunFinished) -> None:
        """Write the file atomically."""
        if self._started is None:
            return
        from ptpipe_report.html.provenance import read_record
        from ptpipe_report.html.report import render

        text = render(self._started, event, self._notices, read_record(event.folder))
        write_atomically(event.folder / FILE_NAME, text.encode("utf-8"))
