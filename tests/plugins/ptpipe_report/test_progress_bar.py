from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ptpipe.events import Progress, StageStarted
from ptpipe_report.console import TerminalWriter
from ptpipe_report.progress_bar import StageProgress
from ptpipe_report.stage_lines import StageLines


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Run:
    """A stage called train whose progress arrives at given times."""

    def __init__(self, width: int = 100, encoding: str = "utf-8", **more: object) -> None:
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        options = {"color_system": None, "legacy_windows": False} | more
        self.console = Console(file=file, width=width, force_terminal=True, _environ={}, **options)
        writer = TerminalWriter(self.console)
        self.clock = Clock()
        self.progress = StageProgress(writer, StageLines(["train", "test"], writer), self.clock)
        self.progress.begin(StageStarted("train", "train.supervised", 1, 2))

    def record(self, now_s: float, done: int, total: int | None = 1000, unit: str = "step", **facts: object) -> None:
        self.clock.now_s = now_s
        self.progress.record(Progress("train", done, total, unit, facts))

    def remaining_s(self) -> float | None:
        self.progress.sample()
        (task,) = self.progress.tasks
        return task.time_remaining

    def drawn(self) -> list[str]:
        self.progress.sample()
        with self.console.capture() as capture:
            self.console.print(self.progress.get_renderable())
        return [line.rstrip() for line in capture.get().splitlines()]


def recorded(marks: list[tuple[float, int]], total: int | None = 1000) -> Run:
    run = Run()
    for now_s, done in marks:
        run.record(now_s, done, total)
    return run


def test_remaining_time_is_at_the_present_speed() -> None:
    assert recorded([(0, 0), (10, 100), (20, 200)]).remaining_s() == pytest.approx(80, abs=1)


def test_the_first_minute_is_forgotten() -> None:
    slow_start = [(float(t), t) for t in range(101)]  # one step per second, then ten per second
    run = recorded(slow_start + [(100.0 + t, 100 + 10 * t) for t in range(1, 71)], total=2000)
    assert run.remaining_s() == pytest.approx((2000 - 800) / 10, rel=0.02)


def test_events_in_quick_succession_do_not_shrink_the_window() -> None:
    """rich keeps 1,000 samples: at 1 ms each, the speed of the last second would pass for that of the last minute."""
    steady = [(t / 1000, t) for t in range(20_000)]
    burst = [(20 + t / 1000, 20_000 + 10 * t) for t in range(1000)]
    run = recorded(steady + burst, total=100_000)
    assert run.remaining_s() == pytest.approx((100_000 - 29_990) / (29_990 / 21), rel=0.05)


def test_a_resumed_training_is_not_taken_for_a_fast_one() -> None:
    assert recorded([(0, 800), (10, 850), (20, 900)]).remaining_s() == pytest.approx(20, abs=1)


def test_other_work_in_the_same_stage_starts_from_scratch_and_keeps_the_clock() -> None:
    run = recorded([(0, 0), (10, 500), (20, 1000)])
    run.record(21, 0, 50, "images")
    assert run.remaining_s() is None
    run.record(22, 10, 50, "images")
    run.record(23, 20, 50, "images")
    assert run.remaining_s() == pytest.approx(3, abs=1)
    (task,) = run.progress.tasks
    assert task.elapsed == 23
    run.record(24, 5, None, "files")
    assert task.total is None and run.progress.describe() == "5 files"


@pytest.mark.parametrize("marks", [[(0, 0)], [(0, 5), (10, 5)]])
def test_one_position_gives_no_speed(marks) -> None:
    assert recorded(marks).remaining_s() is None


def test_without_a_total_there_is_no_remaining_time_and_no_bar() -> None:
    run = recorded([(0, 0), (10, 100), (20, 200)], total=None)
    assert run.remaining_s() is None
    assert run.drawn() == ["⠋ 1/2 train  train.supervised      0:20", "  step 200"]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(-50, 50)), min_size=1, max_size=60), st.integers(0, 100))
def test_any_progress_leaves_no_or_a_positive_remaining_time(steps, total) -> None:
    run, now_s, done = Run(), 0.0, 0
    for step_s, step in steps:
        now_s, done = now_s + step_s, done + step
        run.record(now_s, done, total)
        remaining_s = run.remaining_s()
        assert remaining_s is None or remaining_s >= 0
        assert all(len(line) <= 100 for line in run.drawn())


def test_the_bar_and_the_facts() -> None:
    run = Run()
    assert run.drawn() == ["⠋ 1/2 train  train.supervised      0:00"]
    run.record(0, 0, loss=2.3)
    run.record(20, 310, loss=0.0213)
    run.record(40, 620, loss=0.0107, samples_per_s=4120.3)
    head, facts = run.drawn()
    assert head == "⠋ 1/2 train  train.supervised      0:40  ━━━━━━━━━━━━━━━━━━━━━━━━╸                 62 %  0:25 left"
    assert facts == "  step 620/1,000 · loss 0.0107 · 4,120 samples/s"
    run.record(60, 1000)
    run.clock.now_s = 70
    assert run.drawn()[0].startswith("⠋ 1/2 train  train.supervised      1:10"), (
        "it may still be saving: the clock continues"
    )
    assert run.drawn()[0].endswith("━ 100 %  0:00 left")
    run.progress.end()
    assert "".join(run.drawn()) == ""


def test_an_ascii_terminal_gets_an_ascii_bar() -> None:
    run = Run(encoding="latin-1")
    run.record(0, 500, loss=0.1)
    assert "\n".join(run.drawn()).isascii() and "-----" in run.drawn()[0]


@pytest.mark.parametrize("width", [20, 33, 47, 60, 80, 120])
def test_a_narrow_terminal_shrinks_the_bar_and_wraps_nothing(width) -> None:
    run = Run(width)
    run.record(0, 0)
    run.record(60, 400, loss=0.25, samples_per_s=1234.5, epoch="1/3")
    run.record(120, 500, loss=0.25, samples_per_s=1234.5, epoch="1/3")
    drawn = run.drawn()
    assert len(drawn) == 2 and max(map(len, drawn)) <= width
    assert drawn[0].startswith("⠋ 1/2 train")
    if width >= 60:
        assert "━━━━" in drawn[0] and "50 %" in drawn[0]


def test_facts_of_a_plugin_reach_the_terminal_neutralized() -> None:
    run = Run()
    run.record(0, 1, 10, "[bold]step\x1b]0;title\x07", note="\x1b[2J[red]")
    text = "\n".join(run.drawn())
    assert "\x1b" not in text and "\x07" not in text and "[bold]step" in text and "[red]" in text


def test_stages_may_begin_and_end_while_the_bar_is_drawn() -> None:
    run, is_over, errors = Run(), threading.Event(), []

    def draw() -> None:
        try:
            while not is_over.is_set():
                run.progress.sample()
                list(run.progress.get_renderables())
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    for number in range(2000):
        run.progress.begin(StageStarted("train", "train.supervised", 1, 2))
        run.record(number, 5, 10)
        run.record(number + 0.5, 3, None if number % 2 else 7)
        run.progress.end()
    is_over.set()
    thread.join()
    assert not errors
