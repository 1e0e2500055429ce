"""The running stage, drawn below what was printed and redrawn a few times a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from threading import Event, RLock, Thread

from rich.live import Live
from rich.text import Text

from ptpipe import Progress, StageStarted
from ptpipe_report.figures import clock_text, figure, joined
from ptpipe_report.look import ACCENT, FAINT, Look
from ptpipe_report.pace import Pace
from ptpipe_report.paper import Paper
from ptpipe_report.stage_lines import StageLines
from ptpipe_report.wording import one_line

_INTERVAL_S = 0.5
_WIDEST_BAR, _NARROWEST_BAR = 40, 8
_WIDTH_OF_LEFT = len("  59:59 left")
"""Kept free, so that the bar doesn't change its width with the time left."""
_INDENT = "  "


class Footer:
    """At most two lines at the bottom of a terminal. `open` and `close` once; `close` also after Ctrl-C.

    Being told of progress costs a few microseconds: drawing is the business of a thread of its own, which also
    moves the clock while a stage says nothing. A stage that is over within one interval is never drawn.
    """

    def __init__(self, paper: Paper, lines: StageLines, clock: Callable[[], float]) -> None:
        self._paper, self._stage_lines, self._clock = paper, lines, clock
        self._facts_lock = RLock()
        self._stage: StageStarted | None = None
        self._started_s = 0.0
        self._pace = Pace()
        self._closed = Event()
        self._thread = Thread(target=self._draw_until_closed, name="ptpipe-console", daemon=True)
        self._live = Live(
            console=paper.console,
            get_renderable=self._lines,
            auto_refresh=False,
            transient=True,
            redirect_stderr=True,  # so that a library's warning appears above the bar and not in it
            redirect_stdout=sys.stdout.isatty(),
        )

    def open(self) -> None:
        """Hide the cursor and begin to draw."""
        self._live.start()
        self._thread.start()

    def show(self, stage: StageStarted) -> None:
        """Draw this stage from now on."""
        with self._facts_lock:
            self._stage, self._started_s, self._pace = stage, self._clock(), Pace()

    def tell(self, progress: Progress) -> None:
        """Remember how far the stage is."""
        with self._facts_lock:
            self._pace.tell(progress, self._clock())

    def clear(self) -> None:
        """Draw nothing until the next stage."""
        with self._facts_lock:
            was_running, self._stage = self._stage is not None, None
        if was_running:
            self._live.refresh()

    def close(self) -> None:
        """Wipe the lines and give the cursor back, whatever happens."""
        self._closed.set()
        try:
            if self._thread.is_alive():
                self._thread.join(2 * _INTERVAL_S)
            self.clear()
            self._live.stop()
        finally:
            self._paper.console.show_cursor(True)

    def _draw_until_closed(self) -> None:
        pen = _pen()
        while not self._closed.wait(_INTERVAL_S):
            try:
                with pen:
                    if not self._closed.is_set():
                        self._live.refresh()
            except OSError:  # the terminal is gone; the run is not
                return

    def _lines(self) -> Text:
        with self._facts_lock:
            if self._stage is None:
                return Text()
            now_s = self._clock()
            head = self._head(self._stage, now_s - self._started_s)
            progress, remaining_s = self._pace.latest, self._pace.remaining_s(now_s)
        room = self._paper.console.width - 1  # a full line would make some terminals wrap
        if progress is None:
            head.truncate(room)
            return head
        share = fraction(progress)
        if share is not None:
            _add_bar(head, share, remaining_s, room, self._paper.look)
        facts = Text(_INDENT + progress_facts(progress, self._paper.look.separator), FAINT)
        for line in (head, facts):
            line.truncate(room)
        return Text("\n", no_wrap=True).join((head, facts))

    def _head(self, stage: StageStarted, elapsed_s: float) -> Text:
        frames = self._paper.look.spinner
        sign = frames[int(elapsed_s / _INTERVAL_S) % len(frames)]
        head = self._stage_lines.lead(sign, ACCENT, stage.stage_id)
        self._stage_lines.add_kind(head, stage.kind)
        return head.append(f"  {clock_text(elapsed_s):>7}")


def fraction(progress: Progress) -> float | None:
    """From 0 to 1; None where nobody knows."""
    return min(1.0, max(0.0, progress.done / progress.total)) if progress.total else None


def progress_facts(progress: Progress, separator: str) -> str:
    """`step 291/469 · epoch 1/1 · loss 0.0213 · 4,120 images/s`, or `4,096/10,000 images · 9,300 images/s`."""
    count = f"{progress.done:,}" if progress.total is None else f"{progress.done:,}/{progress.total:,}"
    parts = [f"{count} {progress.unit}" if progress.unit.endswith("s") else f"{progress.unit} {count}"]
    facts = [figure(name, value) for name, value in progress.facts.items() if name != progress.unit]
    return one_line(separator.join([*parts, joined(facts, separator)] if facts else parts))


def _add_bar(head: Text, share: float, remaining_s: float | None, room: int, look: Look) -> None:
    """`  ━━━━━━━━━━━━─────   62 %  0:25 left`, the bar as wide as there is room, the time left where it fits."""
    left = "" if remaining_s is None else f"  {clock_text(remaining_s)} left"
    width = min(_WIDEST_BAR, room - head.cell_len - len("    100 %") - max(len(left), _WIDTH_OF_LEFT))
    if width >= _NARROWEST_BAR:
        num_done = round(share * width)
        head.append("  ")
        head.append(look.bar_done * num_done, ACCENT)
        head.append(look.bar_left * (width - num_done), FAINT)
    head.append(f"  {100 * share:3.0f} %")
    head.append(left, FAINT)


@cache
def _pen() -> RLock:
    """What the drawing thread holds while it writes: no fork happens then.

    A forked child (a data loader's worker) would otherwise be born with the terminal's locks taken by a thread
    that it doesn't have, and hang when it flushes stderr.
    """
    pen = RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=pen.acquire, after_in_parent=pen.release, after_in_child=pen.release)
    return pen
