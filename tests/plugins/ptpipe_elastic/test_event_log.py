"""What workers say, through a file."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import Event, LogLine, Metric, Notice, Progress
from ptpipe_elastic.event_log import tailed, write_event

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers() | st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
EVENTS = (
    st.builds(
        Progress,
        TEXT,
        st.integers(),
        st.none() | st.integers(),
        TEXT,
        st.dictionaries(TEXT, NUMBERS | TEXT, max_size=3),
    )
    | st.builds(Metric, TEXT, TEXT, JSON)
    | st.builds(Notice, TEXT, TEXT)
    | st.builds(LogLine, TEXT, TEXT)
)


@given(st.lists(EVENTS, max_size=8))
def test_every_event_comes_through_as_it_was(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    folder, heard = tmp_path_factory.mktemp("said"), list[Event]()
    with tailed(folder, heard.append):
        for event in events:
            write_event(folder, 0, event)
    seen, want = set[str](), []
    for event in events:
        if not isinstance(event, Notice) or event.text not in seen:
            want.append(event)
        if isinstance(event, Notice):
            seen.add(event.text)
    assert list(map(repr, heard)) == list(map(repr, want)), "to the last type: 1 is not True"


def test_a_number_that_is_none_comes_through(tmp_path: Path) -> None:
    heard: list[Event] = []
    with tailed(tmp_path, heard.append):
        write_event(tmp_path, 0, Metric("t", "loss", math.nan))
        write_event(tmp_path, 0, Metric("t", "loss", math.inf))
    values: list[Any] = [event.value for event in heard if isinstance(event, Metric)]
    assert math.isnan(values[0])
    assert values[1] == math.inf


def heard_within(heard: list[Event], num: int, arrived: threading.Semaphore) -> list[Event]:
    for _ in range(num):
        assert arrived.acquire(timeout=30), heard
    return list(heard)


def test_they_are_told_while_the_work_goes_on(tmp_path: Path) -> None:
    heard, arrived = list[Event](), threading.Semaphore(0)

    def tell(event: Event) -> None:
        heard.append(event)
        arrived.release()

    with tailed(tmp_path, tell):
        write_event(tmp_path, 0, LogLine("t", "one"))
        assert heard_within(heard, 1, arrived) == [LogLine("t", "one")]
        write_event(tmp_path, 0, LogLine("t", "two"))
        assert heard_within(heard, 1, arrived)[1:] == [LogLine("t", "two")]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    file, heard, arrived = tmp_path / "events-0.jsonl", list[Event](), threading.Semaphore(0)

    def tell(event: Event) -> None:
        heard.append(event)
        arrived.release()

    line = json.dumps(["LogLine", {"stage_id": "t", "text": "whole"}]).encode() + b"\n"
    with tailed(tmp_path, tell), file.open("ab", buffering=0) as stream:
        write_event(tmp_path, 0, LogLine("t", "before"))
        stream.write(line[:20])
        assert heard_within(heard, 1, arrived) == [LogLine("t", "before")]
        assert not arrived.acquire(timeout=0.3), "three looks, and nothing but half a line"
        stream.write(line[20:])
        assert heard_within(heard, 1, arrived)[1:] == [LogLine("t", "whole")]


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    """A worker was killed while it wrote."""
    heard: list[Event] = []
    with tailed(tmp_path, heard.append):
        write_event(tmp_path, 0, LogLine("t", "whole"))
        with (tmp_path / "events-0.jsonl").open("ab") as stream:
            stream.write(b'["LogLine", {"stage_id"')
    assert heard == [LogLine("t", "whole")]


def test_nor_does_it_spoil_what_is_said_after_a_restart(tmp_path: Path) -> None:
    heard: list[Event] = []
    with tailed(tmp_path, heard.append):
        (tmp_path / "events-0.jsonl").write_bytes(b'["LogLine", {"stage_id"')
        write_event(tmp_path, 0, LogLine("t", "whole"))
    assert heard == [LogLine("t", "whole")]


def test_what_was_said_before_is_forgotten(tmp_path: Path) -> None:
    heard: list[Event] = []
    write_event(tmp_path, 0, LogLine("t", "of an earlier run"))
    with tailed(tmp_path, heard.append):
        write_event(tmp_path, 0, LogLine("t", "of this one"))
    assert heard == [LogLine("t", "of this one")]


def test_a_notice_is_told_once_and_all_else_as_often_as_it_is_said(tmp_path: Path) -> None:
    heard: list[Event] = []
    with tailed(tmp_path, heard.append):
        for event in (Notice("t", "slow"), LogLine("t", "slow"), Notice("t", "other")) * 2:
            write_event(tmp_path, 0, event)
    assert heard == [Notice("t", "slow"), LogLine("t", "slow"), Notice("t", "other"), LogLine("t", "slow")]


def test_nobody_says_anything(tmp_path: Path) -> None:
    heard: list[Event] = []
    with tailed(tmp_path, heard.append):
        pass
    assert heard == []


def test_the_last_words_are_told_when_the_work_fails(tmp_path: Path) -> None:
    heard: list[Event] = []
    with pytest.raises(ZeroDivisionError), tailed(tmp_path, heard.append):
        write_event(tmp_path, 0, LogLine("t", "last"))
        raise ZeroDivisionError
    assert heard == [LogLine("t", "last")]
    assert "worker events" not in {thread.name for thread in threading.enumerate()}


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    heard: list[Event] = []

    def write(rank: int) -> None:
        for number in range(50):
            write_event(tmp_path, rank, LogLine(str(rank), f"{number} " + "x" * 5000))

    with tailed(tmp_path, heard.append):
        writers = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    for rank in range(4):
        own = [event.text for event in heard if isinstance(event, LogLine) and event.stage_id == str(rank)]
        assert own == [f"{number} " + "x" * 5000 for number in range(50)]
