"""How a failure of workers is told, and which of several is the cause."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ptpipe import Event, LogLine, StageError
from ptpipe.launching import Call, Nodes, error_frames
from ptpipe_elastic import ptpipe_launch
from ptpipe_elastic.bootstrap import log_file
from ptpipe_elastic.launch import _log_output, _message, _stage_error, launch
from ptpipe_elastic.torch_elastic import WorkerFailure, _failures, _signals_to_handle


def failure(rank=1, exit_code=1, message="", last_lines=(), *, is_stage_error=False, is_consequence=False):
    return WorkerFailure(rank, exit_code, message, is_stage_error, is_consequence, last_lines)


def make_call(folder: Path, **changes) -> Call:
    whole = {
        "stage_id": "t",
        "kind": "train.supervised",
        "options": {},
        "seed": 1,
        "key": "k" * 64,
        "inputs": {},
        "artifacts": str(folder),
        "plugins": (),
        "folder": str(folder),
    }
    return Call(**(whole | changes))


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (failure(message="the loss became nan", is_stage_error=True), "the loss became nan"),
        (
            failure(message="worker 0 did not answer", is_stage_error=True, is_consequence=True),
            "worker 0 did not answer",
        ),
        (failure(3, message="KeyError: 'x'"), "worker 3 failed: KeyError: 'x'"),
        (failure(3, message="KeyError: 'x'", last_lines=("a", "b")), "worker 3 failed: KeyError: 'x'"),
        (failure(2, exit_code=-9), "worker 2 was killed by SIGKILL"),
        (
            failure(2, exit_code=-11, last_lines=("a", "oh ", "")),
            "worker 2 was killed by SIGSEGV (its last lines: a | oh)",
        ),
        (failure(2, exit_code=-6, message="said", is_stage_error=True), "worker 2 was killed by SIGABRT"),
        (failure(0, exit_code=3), "worker 0 ended with exit code 3"),
        (
            failure(0, exit_code=3, last_lines=tuple("abcd")),
            "worker 0 ended with exit code 3 (its last lines: b | c | d)",
        ),
    ],
)
def test_every_way_to_fail_is_told_in_a_line(failed: WorkerFailure, words: str) -> None:
    assert _message(failed) == words


def process(folder: Path, rank: int, exit_code: int, said: dict[str, object] | None) -> ProcessFailure:
    """As torch elastic hands it over, read from the file that the worker left."""
    file = folder / f"error-{rank}.json"
    if said is not None:
        file.write_text(json.dumps({"message": "m", "timestamp": 1, **said}), encoding="utf-8")
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file=str(file))


CAUSE = (1, {"message": "its own fault"})
CONSEQUENCE = (1, {"message": "lost another", "is_consequence": True, "is_stage_error": True})
KILLED = (-signal.SIGKILL, None)
ENDED_BY_AGENT = (-signal.SIGTERM, None)


@pytest.mark.parametrize(
    ("endings", "first"),
    [
        ((CONSEQUENCE, CAUSE, ENDED_BY_AGENT), 1),
        ((ENDED_BY_AGENT, KILLED, ENDED_BY_AGENT), 1),
        ((ENDED_BY_AGENT, ENDED_BY_AGENT, KILLED), 2),
        ((KILLED, CONSEQUENCE), 1),  # who lost another waits; that it could end by itself means that one hung
        ((ENDED_BY_AGENT, CONSEQUENCE, CONSEQUENCE), 1),
        ((CAUSE, CAUSE), 0),
        ((KILLED, KILLED), 0),
        ((ENDED_BY_AGENT, ENDED_BY_AGENT), 0),
    ],
)
def test_the_cause_comes_before_its_consequences(endings, first: int, tmp_path: Path) -> None:
    failed = {rank: process(tmp_path, rank, *ending) for rank, ending in enumerate(endings)}
    for order in permutations(failed):
        ordered = _failures(ChildFailedError("t", {rank: failed[rank] for rank in order}), tmp_path)
        assert ordered[0].rank == first
        assert sorted(one.rank for one in ordered) == sorted(failed)


def test_what_a_worker_said_of_its_failure_is_read(tmp_path: Path) -> None:
    log_file(tmp_path, 1).write_bytes(b"\xff first\n" + b"".join(b"line %d\n" % n for n in range(30)))
    frames = ("mine.py:3 in work: open(path)",)
    said = {"message": "no such file", "is_stage_error": True, "frames": frames}
    (read,) = _failures(ChildFailedError("t", {1: process(tmp_path, 1, 1, said)}), tmp_path)
    lines = tuple(f"line {n}" for n in range(10, 30))
    assert read == replace(failure(1, 1, "no such file", lines, is_stage_error=True), frames=frames)
    assert _stage_error(read).frames == error_frames((), (), _stage_error(read)) == frames


def test_a_killed_worker_is_named_with_its_signal(tmp_path: Path) -> None:
    (read,) = _failures(ChildFailedError("t", {1: process(tmp_path, 1, -9, None)}), tmp_path)
    assert (read.rank, read.exit_code, read.is_stage_error, read.is_consequence) == (1, -9, False, False)
    assert _message(read).startswith("worker 1 was killed by SIGKILL")


def test_what_workers_print_comes_into_the_log_with_their_rank(tmp_path: Path) -> None:
    log_file(tmp_path, 0).write_text("one\ntwo\n", encoding="utf-8")
    log_file(tmp_path, 12).write_bytes(b"caf\xe9")
    (tmp_path / "stdout.log").write_text("another's", encoding="utf-8")
    told: list[Event] = []
    _log_output(make_call(tmp_path), tmp_path, told.append)
    assert told == [
        LogLine("t", "[rank 0] one"),
        LogLine("t", "[rank 0] two"),
        LogLine("t", "[rank 12] caf\N{REPLACEMENT CHARACTER}"),
    ]


@pytest.mark.parametrize(("workers", "num_nodes"), [(3, 2), (1, 2), (2, 3)])
def test_nodes_have_as_many_workers_each(workers: int, num_nodes: int, tmp_path: Path) -> None:
    call = make_call(tmp_path, workers=workers, nodes=Nodes(num_nodes, 0, "localhost:1"))
    with pytest.raises(StageError, match=f"{workers} workers can't be divided evenly among {num_nodes} nodes"):
        launch(call, lambda event: None)
    assert list(tmp_path.iterdir()) == []


def test_others_start_what_needs_no_workers_or_has_them(tmp_path: Path) -> None:
    told: list[Event] = []
    assert ptpipe_launch(make_call(tmp_path), told.append) is None
    assert ptpipe_launch(make_call(tmp_path, workers=2, nodes=Nodes(2, 1, started=True)), told.append) is None
    assert told == []
    assert list(tmp_path.iterdir()) == []


def test_the_agent_handles_no_signal_that_the_run_was_started_to_ignore():
    """As torch's own handler would end a run that `nohup` began."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert "SIGTERM" in _signals_to_handle() and "SIGHUP" not in _signals_to_handle()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert "SIGHUP" in _signals_to_handle()
    finally:
        signal.signal(signal.SIGHUP, before)
