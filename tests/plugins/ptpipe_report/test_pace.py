from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe.events import Progress
from ptpipe_report.pace import Pace


def told(marks: list[tuple[float, int]], total: int | None = 1000, unit: str = "step") -> Pace:
    pace = Pace()
    for now_s, done in marks:
        pace.tell(Progress("train", done, total, unit), now_s)
    return pace


def test_remaining_time_is_at_the_present_speed() -> None:
    pace = told([(0, 0), (10, 100)])
    assert pace.remaining_s(10) == pytest.approx(90)
    assert pace.remaining_s(15) == pytest.approx(85), "it counts down between two event"
    assert pace.remaining_s(500) == 0


def test_the_first_half_minute_is_forgotten() -> None:
    slow_start = [(float(t), t) for t in range(61)]  # one a second, then ten a second
    pace = told(slow_start + [(60.0 + t, 60 + 10 * t) for t in range(1, 41)])
    assert pace.remaining_s(100) == pytest.approx((1000 - 460) / 10, rel=0.02)


def test_a_resumed_training_is_not_taken_for_a_fast_one() -> None:
    assert told([(0, 800), (10, 900)]).remaining_s(10) == pytest.approx(10)


def test_another_piece_of_work_starts_anew() -> None:
    pace = told([(0, 0), (10, 1000)])
    pace.tell(Progress("train", 0, 50, "images"), 11)
    assert pace.remaining_s(11) is None
    pace.tell(Progress("train", 10, 50, "images"), 12)
    assert pace.remaining_s(12) == pytest.approx(4)


@pytest.mark.parametrize("marks", [[], [(0, 0)], [(0, 5), (10, 5)]])
def test_nobody_can_tell_without_two_marks_apart(marks) -> None:
    assert told(marks).remaining_s(10) is None


def test_nobody_can_tell_without_a_total() -> None:
    assert told([(0, 0), (10, 100)], total=None).remaining_s(10) is None


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(-50, 50)), min_size=1, max_size=60), st.integers(0, 100))
def test_whatever_is_told_the_rest_is_none_or_not_negative(steps, total) -> None:
    pace, now_s, done = Pace(), 0.0, 0
    for step_s, step in steps:
        now_s, done = now_s + step_s, done + step
        pace.tell(Progress("train", done, total, "step"), now_s)
        remaining_s = pace.remaining_s(now_s)
        assert remaining_s is None or remaining_s >= 0
