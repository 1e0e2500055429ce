from __future__ import annotations

import enum
import errno
import json
import math
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import Outcome
from ptpipe.events import LogLine, Metric, Notice, Progress, StageStarted
from ptpipe_report import JsonLines
from ptpipe_report.json_lines import to_json, to_line


def strict(text: str | bytes) -> object:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict]:
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [strict(line) for line in content.splitlines()]


def test_every_event_is_a_line_with_its_type_and_time(script, tmp_path) -> None:
    before = datetime.now(UTC)
    events = {"pretrain": [Metric("pretrain", "accuracy", 0.5), Notice("pretrain", "n"), LogLine("pretrain", "l")]}
    script.play([JsonLines()], script.mnist(), events)
    written = lines(tmp_path / "events.jsonl")
    expected = ["run_started"] + ["stage_started", "stage_finished"] * 4 + ["run_finished"]
    expected[4:4] = ["metric", "notice", "log"]
    assert [line["type"] for line in written] == expected
    times = [datetime.fromisoformat(line["time"]) for line in written]
    assert times == sorted(times)
    assert (times[0] - before).total_seconds() > -0.002 and all(line["time"].endswith("Z") for line in written)
    finished = written[7]
    assert finished["stage_id"] == "pretrain" and finished["metrics"]["val_accuracy"] == 0.9902
    assert written[0]["folder"] == tmp_path.as_posix()
    assert written[-1]["exit_code"] == 0 and "stages" not in written[-1]


class Word(enum.StrEnum):
    A = "a"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(categories=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_any_metric_makes_one_line_of_strict_json(value) -> None:
    line = to_line(Metric("train", "x", value), datetime.now(UTC))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert strict(line)["value"] == to_json(value)


def test_non_finite_numbers_keep_their_names() -> None:
    assert to_json([math.nan, math.inf, -math.inf, 1.5]) == ["NaN", "Infinity", "-Infinity", 1.5]
    assert to_json((Word.A, Path("a/b"), MappingProxyType({1: None}))) == ["a", "a/b", {"1": None}]


def test_progress_is_thinned_and_its_last_event_kept(script, tmp_path) -> None:
    now_s = 0.0
    reporter = JsonLines(clock=lambda: now_s)
    reporter.run_started(script.started([]))
    for step in range(1000):
        now_s = step * 0.01  # ten seconds
        reporter.event(Progress("train", step, 1000, "step"))
        reporter.event(Progress("other", 1, None, "images"))
    reporter.stage_finished(script.stage("train", "train.supervised"))
    reporter.run_finished(script.ended([]))
    written = lines(tmp_path / "events.jsonl")
    steps = [line["done"] for line in written if line["type"] == "progress" and line["stage_id"] == "train"]
    assert steps == [*range(0, 1000, 100), 999]
    assert [line["type"] for line in written[-4:]] == ["progress", "stage_finished", "progress", "run_finished"]


def test_a_killed_process_leaves_whole_lines(tmp_path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from ptpipe.events import *
from ptpipe_report import JsonLines
reporter = JsonLines()
reporter.run_started(RunStarted("r", "n", "m", Path({str(tmp_path)!r}), (), 7))
reporter.stage_started(StageStarted("train", "train.supervised", 1, 1))
reporter.event(Notice("train", "last words"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert [line["type"] for line in lines(tmp_path / "events.jsonl")] == ["run_started", "stage_started", "notice"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_raises_and_closes_the_file(script, tmp_path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    reporter = JsonLines()
    with pytest.raises(OSError) as caught:
        reporter.run_started(script.started([]))
    assert caught.value.errno == errno.ENOSPC
    reporter.stage_started(StageStarted("train", "train.supervised", 1, 1))  # called again after all: nothing happens


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc on this system")
def test_the_file_is_closed_at_the_end(script) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    script.play([JsonLines()], [script.stage("a", "data.digits", Outcome.DONE)])
    assert set(Path("/proc/self/fd").iterdir()) == before
