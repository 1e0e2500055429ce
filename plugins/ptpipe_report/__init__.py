"""Reporters of a run: the console, `report.html`, `report.md` and `events.jsonl`.

- **Console** (stderr): on a terminal a live progress bar for the running stage, replaced by one line per stage; in a
  pipe or a log file the line per stage and a progress line every ten seconds. Notices are shown at once and at the
  end, followed by the comparison, the gates' verdicts, the outcome, the deliverables and the run's folder, and after a
  failure the command that resumes the run. `NO_COLOR`, narrow terminals and encodings without Unicode are supported.
- **HTML**: `report.html` in the run's folder, one file that opens from disk without network or script: see
  `docs/report.md`.
- **Markdown**: `report.md` in the run's folder, for a pull request or a mail.
- **JSON lines**: `events.jsonl` in the run's folder, one object per event, for other programs.

Other reports and trackers are separate reporters: see `ptpipe.Reporter` and the hook `ptpipe_reporters`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ptpipe import Event, Notice, Reporter, RunFinished, RunStarted, StageFinished, StageStarted, hookimpl
from ptpipe_report.html import HtmlReport
from ptpipe_report.json_lines import JsonLines

if TYPE_CHECKING:
    from rich.console import Console

    from ptpipe_report.screen import Screen

__all__ = ["ConsoleReporter", "HtmlReport", "JsonLines", "MarkdownReport"]


class ConsoleReporter(Reporter):
    """Show a run on stderr, in as much detail as `RunStarted.verbosity` asks for.

    `console`: a rich console to write to instead. `Console(record=True, force_terminal=True, file=io.StringIO())`
    records the run, and its `save_svg` exports it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._screen: Screen | None = None

    def run_started(self, event: RunStarted) -> None:
        """Write what runs."""
        if event.verbosity < -1:  # the caller reports the run itself
            return
        from ptpipe_report.screen import Screen  # imports rich, which only a run needs

        self._screen = Screen(event, self._console)
        self._screen.run_started(event)

    def stage_started(self, event: StageStarted) -> None:
        """Show the stage as the running one."""
        if self._screen:
            self._screen.stage_started(event)

    def event(self, event: Event) -> None:
        """Record progress; write notices at once."""
        if self._screen:
            self._screen.event(event)

    def stage_finished(self, event: StageFinished) -> None:
        """Write the stage's line."""
        if self._screen:
            self._screen.stage_finished(event)

    def run_finished(self, event: RunFinished) -> None:
        """Write the summary."""
        if self._screen:
            self._screen.run_finished(event)


class MarkdownReport(Reporter):
    """Write `report.md` into the run's folder when the run has ended, whatever its outcome."""

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self._notices: list[Notice] = []

    def run_started(self, event: RunStarted) -> None:
        """Keep the manifest's path, overrides and seed, which RunFinished does not have."""
        self._started = event

    def event(self, event: Event) -> None:
        """Keep the run's own notices; a stage's notices are in its StageFinished."""
        if isinstance(event, Notice) and not event.stage_id:
            self._notices.append(event)

    def run_finished(self, event: RunFinished) -> None:
        """Write the file atomically."""
        if self._started is None:
            return
        from ptpipe_report.markdown import write_report

        write_report(self._started, event, self._notices)


@hookimpl
def ptpipe_reporters() -> Iterable[Reporter]:
    """Return new reporters for one run: files in its folder, then the console, which names them."""
    return [HtmlReport(), MarkdownReport(), JsonLines(), ConsoleReporter()]
