"""Progress of the running stage: the estimate of `rich.progress`, and its bar on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from threading import Event, RLock, Thread

from rich.console import RenderableType
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from ptpipe import Progress, StageStarted, one_line
from ptpipe_report.console import TerminalWriter
from ptpipe_report.formatting import clock_text, figure, joined
from ptpipe_report.stage_lines import StageLines
from ptpipe_report.theme import ACCENT, BAR_REMAINDER, FAINT

_REDRAW_S = 0.5
_SPEED_WINDOW_S = 60.0
_SAMPLE_S = 0.25
"""rich keeps 1,000 samples: denser ones would shrink the window that speed is averaged over."""
_MAX_BAR_WIDTH = 40
_LEFT_WIDTH = len("59:59 left")
"""Reserved, so that the bar keeps its width as the remaining time changes."""
_MIN_BAR_ROOM = len(" ━━━━━━━━ 100 %  ") + _LEFT_WIDTH


class StageProgress(RichProgress):
    """Position, speed and remaining time of one stage at a time. Drawn only between `start` and `stop`.

    `clock` returns seconds, as time.monotonic does.
    """

    def __init__(self, writer: TerminalWriter, lines: StageLines, clock: Callable[[], float]) -> None:
        self._separator = writer.theme.separator
        self._latest: Progress | None = None
        self._is_running, self._sampled_s = False, 0.0
        self._stage_column = _StageColumn(writer, lines)
        super().__init__(  # calls get_renderables
            self._stage_column,
            BarColumn(None, BAR_REMAINDER, ACCENT, ACCENT, table_column=Column(max_width=_MAX_BAR_WIDTH)),
            TaskProgressColumn("{task.percentage:>3.0f} % ", markup=False),
            _RemainingColumn(table_column=Column(no_wrap=True, min_width=_LEFT_WIDTH)),
            console=writer.console,
            get_time=clock,
            speed_estimate_period=_SPEED_WINDOW_S,
            auto_refresh=False,  # redrawn by LiveBar: rich's own thread would not be safe to fork beside
            transient=True,
            redirect_stderr=True,  # a library's warning appears above the bar, not in it
            redirect_stdout=sys.stdout.isatty(),
        )
        # The same task for every stage: removing one would race with the drawing thread.
        self.add_task("", total=None, kind="")
        (self._task,) = self.tasks

    def begin(self, stage: StageStarted) -> None:
        """Show this stage from now on."""
        self.end()
        self._task.total = None
        self.reset(self._task.id, description=stage.stage_id, kind=stage.kind)
        self._is_running = True

    def end(self) -> None:
        """Show nothing until the next stage."""
        self._latest, self._is_running = None, False

    def record(self, progress: Progress) -> None:
        """Take the latest event. Another unit or total, or a step back, is new work with a speed of its own."""
        before, self._latest = self._latest, progress
        if before is None or _is_new_work(before, progress):
            started_s, self._task.total = self._task.start_time, progress.total
            self.reset(self._task.id)
            self._task.start_time = started_s
            self.sample()
        elif self.get_time() - self._sampled_s >= _SAMPLE_S:
            self.sample()

    def sample(self) -> None:
        """Bring rich's estimate up to date. Also called by the drawing thread."""
        self._sampled_s = self.get_time()
        if latest := self._latest:
            self.update(self._task.id, completed=latest.done)

    def describe(self) -> str:
        """Return `37 % · step 291/469 · loss 0.0213 · 0:25 left`, for a log file."""
        self.sample()
        assert self._latest is not None, "nothing recorded"
        percent = f"{self._task.percentage:.0f} %" if self._task.total else ""
        parts = [percent, progress_facts(self._latest, self._separator), _remaining(self._task)]
        return self._separator.join(part for part in parts if part)

    def refresh(self) -> None:
        """Do nothing: only LiveBar redraws, so a stage that ends before the next redraw never flashes up."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the stage's line, with a bar where total and width allow one, and the facts of its latest event."""
        latest = self._latest
        if not self._is_running:
            return
        line = self._stage_column.render(self._task)
        has_bar = self._task.total is not None and line.cell_len + _MIN_BAR_ROOM <= self.console.width
        yield self.make_tasks_table([self._task]) if has_bar else line
        if latest is not None:
            yield Text("  " + progress_facts(latest, self._separator), FAINT, no_wrap=True, overflow="ellipsis")


class LiveBar:
    """Redraws a `StageProgress` below the run's output. Call `open` and `close` once; `close` also after Ctrl-C.

    The training loop never waits for the terminal: a thread redraws twice a second, also while a stage is silent.
    """

    def __init__(self, progress: StageProgress) -> None:
        self._progress = progress
        self._closed = Event()
        self._thread = Thread(target=self._redraw_until_closed, name="ptpipe-console", daemon=True)

    def open(self) -> None:
        """Hide the cursor and start drawing."""
        self._progress.start()
        self._thread.start()

    def redraw(self) -> None:
        """Draw now: erases the lines of a finished stage before its result is written."""
        self._progress.live.refresh()

    def close(self) -> None:
        """Erase the bar and show the cursor again, whatever happens."""
        self._closed.set()
        try:
            if self._thread.is_alive():
                self._thread.join(2 * _REDRAW_S)
            self._progress.end()
            self._progress.stop()
        finally:
            self._progress.console.show_cursor(True)

    def _redraw_until_closed(self) -> None:
        lock = _fork_lock()
        while not self._closed.wait(_REDRAW_S):
            try:
                with lock:
                    if not self._closed.is_set():
                        self._progress.sample()
                        self._progress.live.refresh()
            except OSError:  # the terminal is gone; the run continues
                return


class _StageColumn(ProgressColumn):
    """`⠹ 3/12 pretrain  train.supervised    0:41`."""

    def __init__(self, writer: TerminalWriter, lines: StageLines) -> None:
        super().__init__(Column(no_wrap=True))
        self._spinner, self._lines = writer.theme.spinner, lines

    def render(self, task: Task) -> Text:
        # Not task.finished: a stage may still save its result after its last step.
        elapsed_s = task.elapsed or 0.0
        frame = self._spinner[int(elapsed_s / _REDRAW_S) % len(self._spinner)]
        line = self._lines.lead(frame, ACCENT, task.description)
        self._lines.add_kind(line, task.fields["kind"])
        line.no_wrap, line.overflow = True, "ellipsis"
        return line.append(f"  {clock_text(elapsed_s):>7} ")


class _RemainingColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_remaining(task), FAINT)


def progress_facts(progress: Progress, separator: str) -> str:
    """Return `step 291/469 · loss 0.0213 · 4,120 samples/s`, or `4,096/10,000 images · 9,300 samples/s`."""
    count = f"{progress.done:,}" if progress.total is None else f"{progress.done:,}/{progress.total:,}"
    parts = [f"{count} {progress.unit}" if progress.unit.endswith("s") else f"{progress.unit} {count}"]
    facts = [figure(name, value) for name, value in progress.facts.items() if name != progress.unit]
    return one_line(separator.join([*parts, joined(facts, separator)] if facts else parts))


def _is_new_work(before: Progress, after: Progress) -> bool:
    return (before.unit, before.total) != (after.unit, after.total) or after.done < before.done


def _remaining(task: Task) -> str:
    return "" if task.time_remaining is None else f"{clock_text(task.time_remaining)} left"


@cache
def _fork_lock() -> RLock:
    """Return the lock that the drawing thread holds while it writes; `os.fork` waits for it.

    A forked child (a data loader's worker) would otherwise inherit the terminal's locks as held by a thread that it
    does not have, and hang when it flushes stderr.
    """
    lock = RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
