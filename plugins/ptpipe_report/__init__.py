"""Reporters of a run: the console, files in the run's folder, and what CI services show.

- **Console** (stderr): on a terminal a live progress bar for the running stage, replaced by one line per stage; in a
  pipe or a log file the line per stage and a progress line every ten seconds. Notices are shown at once and at the
  end, followed by the comparison, the gates' verdicts, the outcome, the deliverables and the run's folder, and after a
  failure the command that resumes the run. `NO_COLOR`, narrow terminals and encodings without Unicode are supported.
- **HTML**: `report.html` in the run's folder, one file that opens from disk without network or script: see
  `docs/report.md`.
- **Markdown**: `report.md` in the run's folder, for a pull request or a mail.
- **JSON lines**: `events.jsonl` in the run's folder, one object per event, for other programs.
- **Verdict**: `verdict.json` in the run's folder, what the gates decided; `ptpipe schema verdict` prints its schema.
- **CI**: `junit.xml` and `report.sarif` in the run's folder. In GitHub Actions, annotations at the manifest's lines
  and the report in the job's summary.
- **Trackers** (`PTPIPE_TRACKERS=tensorboard,mlflow`): the run in TensorBoard or MLflow, as it happens.

Other reports are separate reporters: see `ptpipe.Reporter` and the hook `ptpipe_reporters`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import Event, Problem, Reporter, RunFinished, RunStarted, StageFinished, StageStarted, hookimpl
from ptpipe_report.end_reporter import EndReporter
from ptpipe_report.html import HtmlReport
from ptpipe_report.json_lines import JsonLines
from ptpipe_report.trackers import new_trackers, tracker_problems

if TYPE_CHECKING:
    from rich.console import Console

    from ptpipe_report.screen import Screen

__all__ = [
    "ConsoleReporter",
    "GitHubAnnotations",
    "GitHubSummary",
    "HtmlReport",
    "JUnitReport",
    "JsonLines",
    "MarkdownReport",
    "SarifReport",
    "VerdictReport",
]


class ConsoleReporter(Reporter):
    """Show a run on stderr, in as much detail as `RunStarted.verbosity` asks for.

    `console`: a rich console to write to instead. `Console(record=True, force_terminal=True, file=io.StringIO())`
    records the run, and its `save_svg` exports it.
    """

    is_screen = True

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


class MarkdownReport(EndReporter):
    """Write `report.md` into the run's folder, atomically."""

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        from ptpipe_report.markdown import write_report

        write_report(started, finished, self.notices)


class VerdictReport(EndReporter):
    """Write `verdict.json` into the run's folder, atomically."""

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        from ptpipe_report.verdict_json import verdict

        _write_json(finished.folder / "verdict.json", verdict(started, finished, datetime.now(UTC)))


class JUnitReport(EndReporter):
    """Write `junit.xml` into the run's folder, atomically."""

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        from ptpipe import write_atomically
        from ptpipe_report.junit import junit_xml

        write_atomically(finished.folder / "junit.xml", junit_xml(started, finished, datetime.now(UTC)))


class SarifReport(EndReporter):
    """Write `report.sarif` into the run's folder, atomically."""

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        from ptpipe_report.sarif import sarif_log

        _write_json(finished.folder / "report.sarif", sarif_log(started, finished, datetime.now(UTC)))


class GitHubAnnotations(EndReporter):
    """Write annotations to stderr, which GitHub Actions reads as it does stdout, where `GITHUB_ACTIONS` is `true`."""

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        if os.environ.get("GITHUB_ACTIONS") == "true" and started.verbosity >= -1:
            from ptpipe_report.github import workflow_commands

            for line in workflow_commands(started, finished):
                print(line, file=sys.stderr)  # noqa: T201  # commands to the runner


class GitHubSummary(EndReporter):
    """Append the report to the file that `GITHUB_STEP_SUMMARY` names, where it names one."""

    def report(self, started: RunStarted, finished: RunFinished) -> None:
        path = os.environ.get("GITHUB_STEP_SUMMARY")
        if path and started.verbosity >= -1:
            from ptpipe_report.github import append_summary
            from ptpipe_report.markdown import sections

            append_summary(Path(path), sections(started, finished, self.notices, datetime.now(UTC)))


def _write_json(path: Path, content: object) -> None:
    from ptpipe import write_atomically

    write_atomically(path, json.dumps(content, indent=1, allow_nan=False).encode("ascii") + b"\n")


@hookimpl
def ptpipe_reporters() -> Iterable[Reporter]:
    """Return new reporters for one run: those of files before the console, which names them; trackers last."""
    files = [HtmlReport(), MarkdownReport(), JsonLines(), VerdictReport(), JUnitReport(), SarifReport()]
    return [*files, ConsoleReporter(), GitHubAnnotations(), GitHubSummary(), *new_trackers()]


@hookimpl
def ptpipe_check() -> Iterable[Problem]:
    """Return what is wrong with the names of trackers."""
    return list(tracker_problems())
