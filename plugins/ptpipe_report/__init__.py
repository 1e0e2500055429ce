"""What a run shows and leaves behind: the console, `report.md` and `events.jsonl`.

- **Console** (stderr): on a terminal a live bar for the running stage, replaced by one line a stage; in a pipe or a log
  file the line a stage and one on progress every ten seconds. Notices are said at once and again at the end, then the
  comparison, what the gates said, how it all ended, where the run's folder is, and after a failure the command that
  goes on. `NO_COLOR` is honoured; narrow terminals and encodings without Unicode get less.
- **Markdown**: `report.md` in the run's folder, for a pull request or a mail.
- **JSON lines**: `events.jsonl` in the run's folder, one object a piece of event, for other programs.

Other reports and trackers are reporters of their own: see `ptpipe.Reporter` and the hook `ptpipe_reporters`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ptpipe import Event, Notice, Reporter, RunFinished, RunStarted, StageFinished, StageStarted, hookimpl

if TYPE_CHECKING:
    from rich.console import Console

    from ptpipe_report.json_lines import JsonLinesFile
    from ptpipe_report.screen import Screen

__all__ = ["ConsoleObserver", "JsonLines", "MarkdownReport"]


class ConsoleObserver(Reporter):
    """Show a run on stderr, as talkative as `RunStarted.verbosity` says.

    `console`: another rich console to write to. `Console(record=True, force_terminal=True, file=io.StringIO())`
    keeps what it is told, and its `save_svg` draws it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._screen: Screen | None = None

    def run_started(self, event: RunStarted) -> None:
        """Say what runs."""
        if event.verbosity < -1:  # whoever started the run tells of it
            return
        from ptpipe_report.screen import Screen  # brings rich: only a run needs it

        self._screen = Screen(event, self._console)
        self._screen.run_started(event)

    def stage_started(self, event: StageStarted) -> None:
        """Show the stage as the running one."""
        if self._screen:
            self._screen.stage_started(event)

    def event(self, event: Event) -> None:
        """Take in progress; say notices at once."""
        if self._screen:
            self._screen.event(event)

    def stage_finished(self, event: StageFinished) -> None:
        """Write the stage's line."""
        if self._screen:
            self._screen.stage_finished(event)

    def run_finished(self, event: RunFinished) -> None:
        """Write what it all came to."""
        if self._screen:
            self._screen.run_finished(event)


class MarkdownReport(Reporter):
    """Write `report.md` into the run's folder once the run has ended, however it ended."""

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self._notices: list[Notice] = []

    def run_started(self, event: RunStarted) -> None:
        """Keep what the end of the run doesn't say again."""
        self._started = event

    def event(self, event: Event) -> None:
        """Keep the run's own notices; the stages' come again with their ends."""
        if isinstance(event, Notice) and not event.stage_id:
            self._notices.append(event)

    def run_finished(self, event: RunFinished) -> None:
        """Write the file, whole or not at all."""
        if self._started is None:
            return
        from ptpipe_report.markdown import write_report

        write_report(self._started, event, self._notices)


class JsonLines(Reporter):
    """Write every piece of event into `events.jsonl` in the run's folder, as it is told.

    One strict JSON object a line: `type`, `time` (UTC) and the fields of the value in `ptpipe.events`. NaN and the
    infinities become the strings `NaN`, `Infinity`, `-Infinity`. Progress is thinned to about one line a second.
    """

    def __init__(self) -> None:
        self._file: JsonLinesFile | None = None

    def run_started(self, event: RunStarted) -> None:
        """Begin the file."""
        from ptpipe_report.json_lines import JsonLinesFile

        self._file = JsonLinesFile(event.folder / "events.jsonl")
        self._file.write(event)

    def stage_started(self, event: StageStarted) -> None:
        """Write it."""
        if self._file:
            self._file.write(event)

    def event(self, event: Event) -> None:
        """Write it; hold progress back where some was written within the last second."""
        if self._file:
            self._file.write_event(event)

    def stage_finished(self, event: StageFinished) -> None:
        """Write how far the stage came, then how it ended."""
        if self._file:
            self._file.write(event)

    def run_finished(self, event: RunFinished) -> None:
        """Write it and end the file. The stages are in it already, each by itself."""
        if self._file:
            self._file.write(event)
            self._file.close()


@hookimpl
def ptpipe_reporters() -> Iterable[Reporter]:
    """Offer this run's console, its Markdown report and its JSON lines."""
    return [ConsoleObserver(), MarkdownReport(), JsonLines()]
