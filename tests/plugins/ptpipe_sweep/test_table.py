"""The table at the end: what differs, what is known, and the command to run the best trial again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ptpipe import ManifestError
from ptpipe.commands import read_settings
from ptpipe_sweep.outcome import Ending, Latency, Quality
from ptpipe_sweep.table import bytes_text, command, ending_lines, explanation, markdown, table

FIRST = Ending(
    1,
    {"lr": 0.001, "backend": "fbgemm"},
    {"a.lr": 0.001, "a.backend": "fbgemm"},
    0,
    "20260101-120000-m-00001",
    75.0,
    model="onnx",
    quality=Quality("accuracy", 0.9913, True),
    size_bytes=434_197,
    latency=Latency(0.0411, 0.04, 0.042, "batch 1, one thread"),
)
SECOND = replace(FIRST, number=2, settings={"lr": 0.01, "backend": "fbgemm"}, quality=Quality("accuracy", 0.98, True))
REFUSED = replace(
    SECOND, number=3, exit_code=3, message="gate: onnx loses 3.20 points of accuracy, 0.30 are allowed, of 10,000"
)
BARE = replace(FIRST, quality=None, size_bytes=None, latency=None, model="", seconds=1.25)


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    monkeypatch.setattr("ptpipe.host.num_threads", lambda: 4)


def test_only_what_differs_is_a_column():
    headings, rows = table([FIRST, SECOND, REFUSED])
    assert headings == ("trial", "lr", "accuracy", "size", "latency", "took", "verdict", "front")
    assert rows[0] == ("1", "0.001", "99.13 %", "434.2 kB", "0.0411 ms", "1 min 15 s", "passed", "*")
    assert rows[1][-1] == ""
    assert rows[2][-2].startswith("refused: gate: onnx loses 3.20 points") and len(rows[2][-2]) <= 9 + 60
    assert "size and latency of 'onnx'; latency at batch 1, one thread" in explanation([FIRST, SECOND])
    compared = replace(FIRST, comparison="compare", split="val", latency=None)
    assert explanation([compared]).startswith("size and quality of 'onnx' by compare on val\n")


def test_what_no_trial_has_is_no_column():
    headings, rows = table([BARE, replace(BARE, settings={"lr": 0.001, "backend": "qnnpack"})])
    assert headings == ("trial", "backend", "took", "verdict")
    assert rows[0] == ("1", "fbgemm", "1.2 s", "passed")
    assert explanation([BARE]) == ""
    assert table([]) == (("trial", "took", "verdict"), [])


def test_the_last_lines_name_the_best_trial_and_its_command():
    lines = ending_lines([FIRST, SECOND, REFUSED], "m.yaml", Path("artifacts"), 4)
    assert lines == [
        "best: trial 1, lr=0.001 backend=fbgemm",
        "run: 20260101-120000-m-00001",
        "again: ptpipe run m.yaml -s a.lr=0.001 -s a.backend=fbgemm",
    ]
    assert ending_lines([REFUSED], "m.yaml", Path("artifacts"), 4) == ["no trial passed"]
    assert "--maximize" in ending_lines([BARE], "m.yaml", Path("artifacts"), 4)[0]


def test_a_column_has_the_mean_over_seeds():
    trials = [
        replace(
            FIRST,
            number=seed,
            settings={"lr": 0.1, "seed": seed},
            quality=Quality("accuracy", value, True),
            split="test",
        )
        for seed, value in ((1, 0.98), (2, 0.99))
    ]
    headings, rows = table(trials)
    assert headings[:4] == ("trial", "seed", "accuracy", "mean over seeds")
    assert [row[3] for row in rows] == ["98.50 % (98.00 % to 99.00 %)"] * 2
    lines = ending_lines(trials, "m.yaml", Path("artifacts"), 4)
    assert lines[0] == "best: trial 1, lr=0.1 seed=1, the first of 2 seeds, by whose mean it was chosen"
    assert lines[-1].startswith("chosen on the test split")
    assert not ending_lines(trials[:1], "m.yaml", Path("artifacts"), 4)[-1].startswith("chosen")


@pytest.mark.parametrize(
    "value",
    ["fbgemm", "a b", "1e-3", "yes", "true", "null", "~", "", "'", "a: b", 1e-05, 3, None, True, [1, "x"], {"a": 1}],
)
def test_the_command_gives_back_every_value(value):
    words = shlex.split(command("m.yaml", {"a.b": value}, Path("elsewhere"), 2))
    assert words[0] == "OMP_NUM_THREADS=2" and words[-2:] == ["--artifacts", "elsewhere"]
    try:
        assert read_settings([words[words.index("-s") + 1]]) == {"a.b": value}
    except ManifestError as error:
        pytest.fail(str(error))


def test_the_command_uses_the_same_artifacts_folder(monkeypatch):
    monkeypatch.delenv("PTPIPE_ARTIFACTS", raising=False)
    assert "--artifacts" not in command("m.yaml", {}, Path("artifacts"), 1)
    monkeypatch.setenv("PTPIPE_ARTIFACTS", "elsewhere")
    assert command("m.yaml", {}, Path("artifacts"), 1).endswith("--artifacts artifacts")


def test_markdown_is_a_table_whatever_the_cells_have():
    assert markdown(("a", "b"), [("x|y", "*")]) == "| a | b |\n| --- | --- |\n| x\\|y | \\* |"
    assert "\n" not in markdown(("a",), []).partition("\n")[2].partition("\n")[2]


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (434_197, "434.2 kB"), (1_692_915, "1.693 MB"), (2e9, "2 GB")]
)
def test_sizes(size, text):
    assert bytes_text(int(size)) == text
