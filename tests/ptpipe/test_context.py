"""What a stage says reaches whoever listens."""

from __future__ import annotations

from fractions import Fraction

import pytest

from ptpipe import Context
from ptpipe.events import LogLine, Metric, Notice, Progress, event_from_json, event_to_json


def test_everything_said_is_told(tmp_path):
    told = []
    ctx = Context("net", "model.mlp", 7, tmp_path, _tell=told.append)
    ctx.progress(3, 10, "batches", loss=0.5)
    ctx.metric(accuracy=0.9, rows=[1, 2])
    ctx.notice("look here")
    ctx.log("a line")
    ctx.log("another", shown=True)
    assert told == [
        Progress("net", 3, 10, "batches", {"loss": 0.5}),
        Metric("net", "accuracy", 0.9),
        Metric("net", "rows", [1, 2]),
        Notice("net", "look here"),
        LogLine("net", "a line"),
        LogLine("net", "another", shown=True),
    ]


@pytest.mark.parametrize(
    ("call", "given", "facts", "message"),
    [
        ("notice", [ValueError("x")], {}, r"ctx.notice\(...\) got a value of type ValueError; say str\(...\)"),
        ("notice", [None], {}, r"ctx.notice\(...\) got a value of type NoneType; say str\(...\)"),
        ("log", [b"x"], {}, r"ctx.log\(...\) got a value of type bytes; say str\(...\)"),
        ("progress", [0.5, 1, "x"], {}, r"ctx.progress\(done=...\) got a value of type float; say int\(...\)"),
        ("progress", [1, "2", "x"], {}, r"ctx.progress\(total=...\) got a value of type str; say int\(...\)"),
        ("progress", [1, None, None], {}, r"ctx.progress\(unit=...\) got a value of type NoneType; say str\(...\)"),
        (
            "progress",
            [1, 2, "x"],
            {"loss": 1j},
            r"ctx.progress\(loss=...\) got a value of type complex; say float\(...\) or int\(...\) or str\(...\)",
        ),
    ],
)
def test_what_would_break_reporters_is_refused_in_the_stage(tmp_path, call, given, facts, message):
    told = []
    with pytest.raises(TypeError, match=f"^{message}$"):
        getattr(Context("net", "model.mlp", 7, tmp_path, _tell=told.append), call)(*given, **facts)
    assert told == []


class Whole:
    """As NumPy's integers."""

    def __index__(self) -> int:
        return 3


def test_numbers_of_other_types_are_reported_as_pythons(tmp_path):
    told = []
    ctx = Context("net", "model.mlp", 7, tmp_path, _tell=told.append)
    ctx.progress(Whole(), 10, "batches", loss=Fraction(1, 2), epoch="1/3", lr=0.1)
    facts = {"loss": 0.5, "epoch": "1/3", "lr": 0.1}
    assert event_from_json(event_to_json(told[0])) == Progress("net", 3, 10, "batches", facts)


def test_without_a_listener_nothing_happens(tmp_path):
    Context("net", "model.mlp", 7, tmp_path).metric(accuracy=0.9)
