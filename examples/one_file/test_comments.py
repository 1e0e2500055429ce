"""Run with `pytest`."""
# ruff: noqa: D103  # a test says what it is in its name

from pathlib import Path

import pytest
import torch
from comments import CommentsConfig, comments, fingerprint

from ptpipe import StageError
from ptpipe.testing import Bench
from ptpipe_torch import Data

pytest_plugins = ["ptpipe.testing"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [f"# a comment of {number} words" for number in range(40)] + [f"x{n} = f({n})" for n in range(60)]
    (tmp_path / "module.py").write_text("\n".join(lines))
    return tmp_path


def test_lines_are_bytes_and_padded_to_the_longest_of_a_batch(bench: Bench, source: Path) -> None:
    data = bench.run(comments, {"path": str(source), "batch_size": 8})
    assert sum(len(data.splits[name]) for name in ("train", "val", "test")) == 80
    (batch, *_) = data.batches("test")
    for row, label in zip(batch.inputs["tokens"], batch.targets["labels"], strict=True):
        text = bytes(int(token) - 1 for token in row if token).decode()
        assert text.startswith("a comment of") == (label == 0)
        assert int(row.count_nonzero()) == len(text)


def test_the_stored_data_set_is_the_same(bench: Bench, source: Path, tmp_path: Path) -> None:
    data = bench.run(comments, {"path": str(source)})
    (tmp_path / "stored").mkdir()
    data.save(tmp_path / "stored")
    stored = Data.load(tmp_path / "stored")
    for one, other in zip(data.batches("train"), stored.batches("train"), strict=True):
        assert torch.equal(one.inputs["tokens"], other.inputs["tokens"])


def test_a_change_is_noticed_and_too_few_comments_are_an_error(bench: Bench, source: Path) -> None:
    config = CommentsConfig(path=str(source))
    before = fingerprint(config)
    (source / "module.py").write_text("x = 1\n")
    assert fingerprint(config) != before
    with pytest.raises(StageError, match="too few comments: 0 in 1 Python files"):
        bench.run(comments, {"path": str(source)})
