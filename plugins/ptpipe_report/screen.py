"""What `ptpipe run` looks like: a line a stage, the running one below, and what it all came to at the end."""

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
)
from ptpipe_report import story
from ptpipe_report.comparison import tables
from ptpipe_report.figures import clock_text, seconds_text
from ptpipe_report.footer import Footer, fraction, progress_facts
from ptpipe_report.look import FAINT, NOTICE, STYLES
from ptpipe_report.pace import Pace
from ptpipe_report.paper import Paper
from ptpipe_report.screen_table import draw
from ptpipe_report.stage_lines import StageLines
from ptpipe_report.wording import one_line

_PROGRESS_LINE_S = 10.0
_MARGIN = "  "


class Screen(Reporter):
    """The console's view of one run."""

    def __init__(
        self, started: RunStarted, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._started, self._clock = started, clock
        self._paper = Paper(console)
        self._lines = StageLines(started.stage_ids, self._paper)
        self._is_quiet, self._is_verbose = started.verbosity < 0, started.verbosity > 0
        self._notices = story.Notices()
        self._pace, self._line_due_s = Pace(), 0.0
        is_live = self._paper.is_live and not self._is_quiet
        self._footer = Footer(self._paper, self._lines, clock) if is_live else None

    def run_started(self, event: RunStarted) -> None:
        """Say what runs."""
        if self._is_quiet:
            return
        facts = [event.manifest_path, f"{len(event.stage_ids)} stages", f"seed {event.seed}", *event.overrides]
        told = one_line(self._paper.look.separator.join(facts))
        self._paper.line(Text.assemble((one_line(event.name), "bold"), ("  " + told, FAINT)))
        self._paper.blank()
        if self._footer:
            self._footer.open()

    def stage_started(self, event: StageStarted) -> None:
        """Show it as the running one."""
        self._pace, self._line_due_s = Pace(), self._clock() + _PROGRESS_LINE_S
        if self._footer:
            self._footer.show(event)

    def event(self, event: Event) -> None:
        """Take in progress; say notices at once, log lines where they are asked for."""
        if isinstance(event, Progress):
            self._take_progress(event)
        elif isinstance(event, Notice) and self._notices.add(event):
            self._say_notice(event)
        elif isinstance(event, LogLine) and self._is_verbose:
            self._paper.entry(Text(f"{_MARGIN}{one_line(event.stage_id)}: ", FAINT), event.text, FAINT)

    def stage_finished(self, event: StageFinished) -> None:
        """Replace the running stage by a line on how it ended."""
        if self._footer:
            self._footer.clear()
        is_bad = event.outcome in {Outcome.FAILED, Outcome.REFUSED}
        if is_bad or not self._is_quiet:
            self._paper.line(self._lines.finished(event))
        if event.outcome is Outcome.FAILED and event.message:
            self._paper.entry(Text(_MARGIN), event.message, STYLES[Outcome.FAILED])
            for frame in event.frames:
                self._paper.entry(Text(_MARGIN * 2), frame, FAINT)
        if self._is_verbose and event.key:
            self._paper.line(Text(f"{_MARGIN}key {event.key[:12]}  {event.made_at}".rstrip(), FAINT))
        for notice in self._notices.add_all(event):
            self._say_notice(notice)

    def run_finished(self, event: RunFinished) -> None:
        """Give the terminal back; say what it all came to."""
        if self._footer:
            self._footer.close()
        if not self._is_quiet:
            for table in tables(event.stages):
                self._paper.blank()
                draw(table, self._paper)
        self._say_gates(event)
        if list(self._notices):
            self._paper.blank()
        for notice in self._notices:
            self._say_notice(notice)
        self._say_ending(event)

    def _take_progress(self, progress: Progress) -> None:
        if self._footer:
            self._footer.tell(progress)
            return
        now_s = self._clock()
        self._pace.tell(progress, now_s)
        if now_s < self._line_due_s or self._is_quiet:
            return
        self._line_due_s = now_s + _PROGRESS_LINE_S
        separator = self._paper.look.separator
        remaining_s = self._pace.remaining_s(now_s)
        share = fraction(progress)
        facts = [] if share is None else [f"{100 * share:.0f} %"]
        facts.append(progress_facts(progress, separator))
        facts += [] if remaining_s is None else [f"{clock_text(remaining_s)} left"]
        self._paper.line(self._lines.running(progress.stage_id, separator.join(facts)))

    def _say_notice(self, notice: Notice) -> None:
        place = f"{one_line(notice.stage_id)}: " if notice.stage_id else ""
        self._paper.entry(Text(f"{self._paper.look.notice} {place}", NOTICE), notice.text, NOTICE)

    def _say_gates(self, event: RunFinished) -> None:
        gates = [gate for gate in story.gates(event.stages) if not (self._is_quiet and story.is_good(gate))]
        if gates:
            self._paper.blank()
        for gate in gates:
            style = STYLES.get(gate.decision, NOTICE)
            lead = Text.assemble(
                (f"{self._paper.look.sign(gate.decision)} ", style),
                (self._lines.padded_id(gate.stage_id, [gate.stage_id for gate in gates]), "bold"),
                (f"{_MARGIN}{one_line(gate.decision):9}{_MARGIN}", style),
            )
            self._paper.entry(lead, gate.reason)

    def _say_ending(self, event: RunFinished) -> None:
        failed = [stage for stage in event.stages if stage.outcome is Outcome.FAILED and not event.interrupted]
        ending = story.ending(event)
        outcome = Outcome.DONE if event.exit_code == ExitCode.DONE else Outcome.FAILED
        took = f"{'in' if outcome is Outcome.DONE else 'after'} {seconds_text(event.seconds)}"
        lead = f"{self._paper.look.sign(outcome)} {one_line(event.name)} {ending} {took}"
        self._paper.blank()
        self._paper.entry(Text(lead + _MARGIN, STYLES[outcome]), story.tally(event.stages))
        for stage in failed:
            self._paper.entry(Text(f"{_MARGIN}{one_line(stage.stage_id)}: ", "bold"), stage.message)
        if event.exit_code not in {ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED}:
            self._paper.verbatim(Text(f"{_MARGIN}go on with  ", FAINT), story.command(self._started))
        self._paper.verbatim(Text(f"{_MARGIN}run folder  ", FAINT), _as_seen_from_here(event.folder))


def _as_seen_from_here(folder: Path) -> str:
    """The path that one would type; absolute where the folder is elsewhere."""
    try:
        return str(folder.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):  # the working folder may be gone
        return str(folder)
