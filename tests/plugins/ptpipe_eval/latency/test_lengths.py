"""Latency at several lengths of sequences. Shape legend: B samples of a batch, L their length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptpipe import StageError
from ptpipe_eval import Row, StartUp, eval_latency
from ptpipe_eval.config import EvalLatencyConfig
from ptpipe_eval.graph import companions
from ptpipe_eval.graph.companions import count_costs, with_limits
from ptpipe_eval.graph.facts import Peaks
from ptpipe_eval.latency import latencies
from ptpipe_eval.latency.inputs import check_lengths, spread_inputs
from ptpipe_eval.latency.session import Session
from ptpipe_eval.predict import select_split
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    FunctionRef,
    Model,
    RaggedColumn,
    Recipe,
    Split,
    TokensInfo,
)  # fmt: skip

from ....latencies import latency

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, tokens):
        return self.out(self.table(tokens)).mean(1)
"""


@pytest.fixture(scope="module")
def texts() -> Data:
    lengths = [3, 5, 9, 4]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = RaggedColumn(np.arange(1, sum(lengths) + 1) % 19 + 1, starts, 0)
    labels = ArrayColumn(np.array([0, 1, 0, 1]))
    split = Split(np.array([f"test/{i}" for i in range(4)]), {"tokens": tokens}, {"labels": labels})
    inputs = {"tokens": TokensInfo(vocabulary_size=20, max_length=16)}
    return Data(DatasetInfo("texts", inputs, Classification(class_names=("a", "b"))), {"test": split})


def test_texts_are_cut_or_padded(texts: Data) -> None:
    split = select_split(texts, "test")
    (own,) = spread_inputs(split, 4)
    for length in (2, 9, 12):
        (batch,) = spread_inputs(split, 4, length)
        tokens_BL = batch["tokens"]
        assert tokens_BL.shape == (4, length) and tokens_BL.dtype == np.int64
        np.testing.assert_array_equal(tokens_BL[:, :9], own["tokens"][:, : min(length, 9)])
        assert (tokens_BL[:, 9:] == 0).all()


def test_lengths_that_can_not_be(texts: Data, digits: Data) -> None:
    message = r"lengths: no input of digits has an axis of any size: images \(batch, 1, 8, 8\) float32"
    with pytest.raises(StageError, match=message):
        check_lengths(select_split(digits, "test"), (8,))
    with pytest.raises(StageError, match="lengths: 17 is longer than any text of texts, whose max_length is 16"):
        check_lengths(select_split(texts, "test"), (8, 17))
    check_lengths(select_split(digits, "test"), ())


@pytest.fixture
def model(texts: Data, tmp_path: Path) -> Model:
    """Multiplies 8 by 2 values for each token."""
    file = tmp_path / "mine.py"
    file.write_text(NET)
    recipe = Recipe(FunctionRef.in_file(file, "Net", {}), texts.info.signature)
    tensors = {"table.weight": torch.ones(20, 8), "out.weight": torch.ones(2, 8), "out.bias": torch.ones(2)}
    return Model(recipe, tensors).with_source_functions([f"{file}:Net"])


def test_limits_are_those_of_the_length(texts: Data, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = Peaks(1, {"float32": 1e9}, {})
    monkeypatch.setattr(companions, "machine_peaks", lambda number: peaks)
    split = select_split(texts, "test")
    (costs,) = count_costs([model], split)
    assert (costs.macs, costs.sizes) == (3 * 16, {"length": 3})
    cells = tuple(latency(1, 0.5, length=length) for length in (4, 16, None))
    row = Row("net", model.format, model.size_bytes, {}, cells, costs=costs)
    (limited,), found = with_limits([row], [model], split)
    # A text of a length of its own has no limit that is one number.
    assert [cell.limit_ms for cell in limited.latencies] == [4 * 16 / 1e6, 16 * 16 / 1e6, None]
    assert limited.latency(1, "one", 16).peak_fraction == pytest.approx(16 * 16 / 1e6 / 0.5)
    assert limited.latency(1, "one", 5) is None and found == (peaks,)


def test_a_latency_beyond_the_peak_has_no_limit_and_the_peak_is_measured_again(
    texts: Data, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(companions, "machine_peaks", lambda number: Peaks(1, {"float32": 1.0}, {}))
    monkeypatch.setattr(companions, "forget_peaks", forgotten.append)
    split = select_split(texts, "test")
    row = Row("net", "f", 1, {}, (latency(1, 0.5, length=4),), costs=count_costs([model], split)[0])
    (limited,), _ = with_limits([row], [model], split)
    assert limited == row and forgotten == [1]


def test_a_length_is_measured_by_the_stage(
    texts: Data, model: Model, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Measured(Session):
        def measure(self, names: Any, *_: Any) -> Any:
            seen.extend(
                (cell.batch_size, cell.length, cell.batches["normalized"][0]["tokens"].shape) for cell in self.inputs
            )
            return [latencies.Measured((latency(1, 0.5, length=7),), StartUp(1.0, 1.0, 1)) for _ in names]

    monkeypatch.setattr("ptpipe_eval.compare.Session", Measured)
    monkeypatch.setattr(companions, "machine_peaks", lambda number: Peaks(1, {}, {}))
    config = EvalLatencyConfig(batch_sizes=(1, 2), lengths=(4, 16))
    made = eval_latency(config, context("eval.latency", models=("net",)), [model], texts)
    assert seen == [(1, 4, (1, 4)), (1, 16, (1, 16)), (2, 4, (2, 4)), (2, 16, (2, 16))]
    assert made.summary()["rows"][0]["latency"][0]["length"] == 7
    with pytest.raises(StageError, match="lengths: 17 is longer"):
        eval_latency(EvalLatencyConfig(lengths=(17,)), context("eval.latency", models=("net",)), [model], texts)
