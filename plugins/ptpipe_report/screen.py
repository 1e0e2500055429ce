"""The console view of one run: a line per stage, the running stage below, and a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ptpipe import (
    Event,
    ExitCode,
    LogLine,
    Notice,
    Outcome,
    Progress,
    Reporter,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    one_line,
)
from ptpipe_report import run_summary
from ptpipe_report.comparison import tables
from ptpipe_report.comparison_table import print_table
from ptpipe_report.console import TerminalWriter
from ptpipe_report.formatting import counted, seconds_text
from ptpipe_report.html import FILE_NAME as REPORT
from ptpipe_report.progress_bar import LiveBar, StageProgress
from ptpipe_report.stage_lines import StageLines
from ptpipe_report.theme import FAINT, NOTICE, STYLES

_IN_VIEW_S = 30.0
"""A run that takes no longer shows a notice when it comes, and not at the end again."""
_PROGRESS_LINE_S = 10.0
_MARGIN = "  "


class Screen(Reporter):
    """Writes one run to a console; `clock` returns seconds, as time.monotonic does."""

    def __init__(
        self, started: RunStarted, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._started, self._clock = started, clock
        self._writer = TerminalWriter(console)
        self._lines = StageLines(started.stage_ids, self._writer, started.kinds)
        self._is_quiet, self._is_verbose = started.verbosity < 0, started.verbosity > 0
        self._notices = run_summary.Notices()
        self._line_due_s = 0.0
        self._progress = StageProgress(self._writer, self._lines, clock)
        self._bar = LiveBar(self._progress) if self._writer.is_live and not self._is_quiet else None

    def run_started(self, event: RunStarted) -> None:
        """Write what runs."""
        if self._is_quiet:
            return
        facts = [event.manifest_path, counted(len(event.stage_ids), "stage"), f"seed {event.seed}", *event.overrides]
        shown = one_line(self._writer.theme.separator.join(facts))
        self._writer.line(Text.assemble((one_line(event.name), "bold"), ("  " + shown, FAINT)))
        self._writer.blank()
        if self._bar:
            self._bar.open()

    def stage_started(self, event: StageStarted) -> None:
        """Show it as the running stage."""
        self._line_due_s = self._clock() + _PROGRESS_LINE_S
        self._progress.begin(event)

    def event(self, event: Event) -> None:
        """Record progress; write a notice at once, and a log line if it is to be shown or the run is verbose."""
        if isinstance(event, Progress):
            self._progress.record(event)
            self._write_progress(event)
        elif isinstance(event, Notice) and self._notices.add(event):
            self._write_notice(event)
        elif isinstance(event, LogLine) and (self._is_verbose or (event.shown and not self._is_quiet)):
            self._writer.entry(Text(f"{_MARGIN}{one_line(event.stage_id)}: ", FAINT), event.text, FAINT)

    def stage_finished(self, event: StageFinished) -> None:
        """Replace the running stage by a line on how it ended."""
        self._progress.end()
        if self._bar:
            self._bar.redraw()
        is_bad = event.outcome in {Outcome.FAILED, Outcome.INTERRUPTED, Outcome.REFUSED, Outcome.UNDECIDED}
        if is_bad or not self._is_quiet:
            self._writer.line(self._lines.finished(event))
        if event.outcome is Outcome.FAILED and event.message:
            self._writer.entry(Text(_MARGIN), event.message, STYLES[Outcome.FAILED])
            for frame in event.frames:
                self._writer.entry(Text(_MARGIN * 2), frame, FAINT)
        if self._is_verbose and event.key:
            self._writer.line(Text(one_line(f"{_MARGIN}key {event.key[:12]}  {event.made_at}").rstrip(), FAINT))
        for notice in self._notices.add_all(event):
            self._write_notice(notice)

    def run_finished(self, event: RunFinished) -> None:
        """Restore the terminal and write the summary."""
        if self._bar:
            self._bar.close()
        if not self._is_quiet:
            for table in tables(event.stages):
                self._writer.blank()
                print_table(table, self._writer)
        self._write_gates(event)
        if list(self._notices) and event.seconds > _IN_VIEW_S and not self._is_quiet:  # else none has left the screen
            self._writer.blank()
            for notice in self._notices:
                self._write_notice(notice)
        self._write_ending(event)
        self._write_paths(event)

    def _write_progress(self, progress: Progress) -> None:
        now_s = self._clock()
        if self._bar or self._is_quiet or now_s < self._line_due_s:
            return
        self._line_due_s = now_s + _PROGRESS_LINE_S
        self._writer.line(self._lines.running(progress.stage_id, self._progress.describe()))

    def _write_notice(self, notice: Notice) -> None:
        stage = f"{one_line(notice.stage_id)}: " if notice.stage_id else ""
        self._writer.entry(Text(f"{self._writer.theme.notice} {stage}", NOTICE), notice.text, NOTICE)

    def _write_gates(self, event: RunFinished) -> None:
        gates = [gate for gate in run_summary.gates(event.stages) if not (self._is_quiet and gate.is_passed)]
        if gates:
            self._writer.blank()
        for gate in gates:
            style = STYLES.get(gate.decision, NOTICE)
            lead = Text.assemble(
                (f"{self._writer.theme.symbol(gate.decision)} ", style),
                (self._lines.padded_id(gate.stage_id, [gate.stage_id for gate in gates]), "bold"),
                (f"{_MARGIN}{one_line(gate.decision):9}{_MARGIN}", style),
            )
            self._writer.entry(lead, gate.reason)

    def _write_ending(self, event: RunFinished) -> None:
        failed = [stage for stage in event.stages if stage.outcome is Outcome.FAILED]
        outcome = Outcome.DONE if event.exit_code == ExitCode.DONE else Outcome.FAILED
        duration = f"{'in' if outcome is Outcome.DONE else 'after'} {seconds_text(event.seconds)}"
        symbol, ending = self._writer.theme.symbol(outcome), run_summary.ending(event)
        self._writer.blank()
        style = STYLES[outcome]
        if outcome is Outcome.DONE and (caveat := run_summary.caveat(event)):
            symbol, style, duration = self._writer.theme.notice, NOTICE, f"{duration}, but {one_line(caveat)}"
        lead = Text(f"{symbol} {one_line(event.name)} {ending} {duration}{_MARGIN}", style)
        self._writer.entry(lead, run_summary.tally(event.stages))
        for stage in failed:
            self._writer.entry(Text(f"{_MARGIN}{one_line(stage.stage_id)}: ", "bold"), stage.message)

    def _write_paths(self, event: RunFinished) -> None:
        if event.exit_code not in {ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED}:
            self._writer.verbatim(Text(f"{_MARGIN}resume with:   ", FAINT), run_summary.command(self._started))
        self._writer.verbatim(Text(f"{_MARGIN}run folder:    ", FAINT), _relative_to_cwd(event.folder))
        report = event.folder / REPORT
        if report.is_file():
            shown = _relative_to_cwd(report)
            self._writer.verbatim(Text(f"{_MARGIN}report:        ", FAINT), shown, link=report.absolute().as_uri())
        if files := run_summary.deliverables(event):
            names = self._writer.theme.separator.join(run_summary.grouped_by_folder(files))
            self._writer.entry(Text(f"{_MARGIN}deliverables:  ", FAINT), names)


def _relative_to_cwd(path: Path) -> str:
    """Return the path as one would type it here; absolute if it lies elsewhere."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):  # the working folder may be gone
        return str(path)
