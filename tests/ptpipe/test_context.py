"""What a stage says reaches whoever listens."""

from __future__ import annotations

from ptpipe import Context
from ptpipe.events import LogLine, Metric, Notice, Progress


def test_everything_said_is_told(tmp_path):
    told = []
    ctx = Context("net", "model.mlp", 7, tmp_path, _tell=told.append)
    ctx.progress(3, 10, "batches", loss=0.5)
    ctx.metric(accuracy=0.9, rows=[1, 2])
    ctx.notice("look here")
    ctx.log("a line")
    assert told == [
        Progress("net", 3, 10, "batches", {"loss": 0.5}),
        Metric("net", "accuracy", 0.9),
        Metric("net", "rows", [1, 2]),
        Notice("net", "look here"),
        LogLine("net", "a line"),
    ]


def test_without_a_listener_nothing_happens(tmp_path):
    Context("net", "model.mlp", 7, tmp_path).metric(accuracy=0.9)
