"""What a worker passes on, and what it leaves where it failed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from ptpipe import Event, LogLine, Metric, Notice, Progress, StageError
from ptpipe.launching import Call
from ptpipe_elastic.event_log import tailed
from ptpipe_elastic.worker import _count_start, _teller, _write_error, call_file, main
from ptpipe_torch.distributed.worker_group import WorkerGroupError

SAID: tuple[Event, ...] = (
    Progress("t", 1, 2, "images", {"loss": 0.5}),
    Metric("t", "loss", 0.5),
    LogLine("t", "made it", shown=True),
    Notice("t", "slow"),
)


def heard(folder: Path, ranks: Iterable[int]) -> list[Event]:
    events: list[Event] = []
    with tailed(folder, events.append):
        for rank in ranks:
            tell = _teller(folder, rank)
            for event in SAID:
                tell(event)
    return events


def test_rank_0_speaks_for_all(tmp_path: Path) -> None:
    progress, metric, _, notice = SAID
    assert heard(tmp_path, [0]) == [progress, metric, LogLine("t", "[rank 0] made it", shown=True), notice]


def test_of_the_others_only_the_log_is_heard_with_their_rank(tmp_path: Path) -> None:
    assert set(heard(tmp_path, [3, 12])) == {LogLine("t", f"[rank {rank}] made it", shown=True) for rank in (3, 12)}


def test_each_start_of_rank_0_but_the_first_gives_a_notice(tmp_path: Path) -> None:
    notices: list[Event] = []
    with tailed(tmp_path, notices.append):
        for _ in range(3):
            _count_start(tmp_path, "train")
    text = "a worker failed, or its node left: all workers restarted from the last checkpoint (restart {})"
    assert notices == [Notice("train", text.format(1)), Notice("train", text.format(2))]


def test_together_they_say_everything_once(tmp_path: Path) -> None:
    events = heard(tmp_path, [1, 0, 2])
    assert [event for event in events if not isinstance(event, LogLine)] == [SAID[0], SAID[1], SAID[3]]
    assert {event.text[:8] for event in events if isinstance(event, LogLine)} == {"[rank 0]", "[rank 1]", "[rank 2]"}
    assert len(events) == 6


class MuteError(StageError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "message", "is_stage_error", "is_consequence"),
    [
        (StageError("the loss became nan"), "the loss became nan", True, False),
        (WorkerGroupError("worker 0 did not answer"), "worker 0 did not answer", True, True),
        (KeyError("x"), "KeyError: 'x'", False, False),
        (SystemExit(0), "SystemExit: 0", False, False),
        (MuteError("x"), "<its __str__ raised RuntimeError>", True, False),
    ],
)
def test_an_error_is_left_for_the_parent(
    error, message, is_stage_error, is_consequence, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    _write_error(error)
    content = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))
    assert isinstance(content.pop("timestamp"), int)
    flags = {"is_stage_error": is_stage_error, "is_consequence": is_consequence}
    assert content == {"message": message, "frames": [], **flags}
    assert type(error).__name__ in capsys.readouterr().err, "the traceback is in the log"


PLUGIN = """
from __future__ import annotations
import torch
from ptpipe import Context, StageConfig, stage
from ptpipe_torch import Ranges

torch.set_default_dtype(torch.float64)

@stage("failing.fail")
def fail(config: StageConfig, ctx: Context) -> Ranges:
    '''Fail.'''
    raise ValueError(torch.get_default_dtype())
"""


def test_the_lines_of_the_plugin_are_left_for_the_parent(tmp_path, monkeypatch) -> None:
    (tmp_path / "failing.py").write_text(PLUGIN, encoding="utf-8")
    place = str(tmp_path)
    call = Call("t", "failing.fail", {}, 1, "k" * 64, {}, f"{place}/artifacts", ("./failing.py",), place, workers=2)
    call_file(tmp_path, 0).write_text(call.to_json(), encoding="utf-8")
    for name, value in (("RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), ("TORCHELASTIC_ERROR_FILE", f"{place}/error.json")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ptpipe_elastic.worker.exit_now", sys.exit)
    monkeypatch.setattr("ptpipe_elastic.worker.gc.freeze", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        with pytest.raises(SystemExit, match="1"):
            main(tmp_path, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    content = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))
    assert content["message"] == "ValueError: torch.float32", "not what the plugin's module had set"
    assert content["frames"] == ["failing.py:12 in fail: raise ValueError(torch.get_default_dtype())"]
