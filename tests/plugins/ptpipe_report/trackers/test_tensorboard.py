"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra `tensorboard`)")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ptpipe import Outcome, Progress
from ptpipe_report.trackers.tensorboard import TensorBoardTracker

OPTIONS = {"pretrain": {"lr": 0.05, "schedule": {"name": "cosine"}}, "gate": {"candidate": "onnx|<b>"}}


def events(folder):
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


def scalar(found, tag):
    """Step and value of each point: TensorBoard gives scalars that were written so as tensors too."""
    return [(event.step, pytest.approx(event.value, rel=1e-6)) for event in found.Scalars(tag)]


def text(found, tag):
    (event,) = found.Tensors(tag)
    return event.tensor_proto.string_val[0].decode()


def run_of(script, tracker):
    started = replace(script.started(script.mnist()), options=OPTIONS, overrides=("finetune.lr=0.001",))
    tracker.run_started(started)
    return script.mnist()


def test_a_run_is_there_when_it_has_ended(script, tmp_path):
    tracker = TensorBoardTracker()
    for stage in run_of(script, tracker):
        if stage.stage_id == "pretrain":
            tracker.event(Progress("pretrain", 64, 128, "samples", {"epoch": 1, "step": 1, "loss": 0.5}))
            tracker.event(Progress("pretrain", 128, 128, "samples", {"epoch": 1, "val_accuracy": 0.75}))
        tracker.stage_finished(stage)
    tracker.run_finished(script.ended(script.mnist()))
    found = events(tmp_path)
    assert scalar(found, "pretrain/loss") == [(1, 0.5)]
    assert scalar(found, "pretrain/epoch/val_accuracy") == [(1, 0.75)]
    assert scalar(found, "pretrain/result/val_accuracy") == [(0, 0.9902)]
    assert scalar(found, "compare/onnx/size") == [(0, 438713.0)]
    plugin = found.SummaryMetadata("options").plugin_data.plugin_name
    assert plugin == "text"
    assert "| pretrain.lr | 0.05 |" in text(found, "options")
    assert r"onnx\|\<b\>" in text(found, "options"), "what comes from a manifest is no markup"
    assert "finetune.lr=0.001" in text(found, "overrides")
    assert text(found, "verdict/gate").startswith("**passed**: onnx loses 0.30 points")
    assert text(found, "verdict") == "done"
    table = text(found, "comparison/compare").splitlines()
    assert table[0].startswith("| name |") and len(table) == 5


def test_points_can_be_seen_while_the_run_goes_on(script, tmp_path, monkeypatch):
    monkeypatch.setattr("ptpipe_report.trackers.tensorboard._FLUSH_S", 0)
    tracker = TensorBoardTracker()
    run_of(script, tracker)
    tracker.event(Progress("pretrain", 64, 128, "samples", {"epoch": 1, "step": 1, "loss": 0.5}))
    tracker._writer.flush()
    assert scalar(events(tmp_path), "pretrain/loss") == [(1, 0.5)]
    failed = script.stage("pretrain", "train.supervised", Outcome.FAILED, message="the loss became nan")
    tracker.stage_finished(failed)
    tracker.run_finished(script.ended([failed], exit_code=1))
    assert text(events(tmp_path), "verdict") == "failed"


def test_writing_imports_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ptpipe import RunStarted, RunFinished; "
        "from ptpipe_report.trackers.tensorboard import TensorBoardTracker as T; t = T(); "
        f"p = Path({str(tmp_path)!r}); t.run_started(RunStarted('r', 'n', 'm', p, (), 7)); "
        "t.run_finished(RunFinished('r', 'n', p, 0, 1.0, ())); "
        "print([name for name in ('torch', 'tensorflow') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
