"""`report.html`, a run's report as one file that opens from disk: see `docs/report.md`."""

from __future__ import annotations

from ptpipe import RunFinished, RunStarted, write_atomically
from ptpipe_report.end_reporter import EndReporter

__all__ = ["FILE_NAME", "HtmlReport"]

FILE_NAME = "report.html"


class HtmlReport(EndReporter):
    """Write `report.html` into the run's folder, atomically."""

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        from ptpipe_report.html.provenance import read_record
        from ptpipe_report.html.report import render

        text = render(started, finished, self.notices, read_record(finished.folder))
        write_atomically(finished.folder / FILE_NAME, text.encode("utf-8"))
