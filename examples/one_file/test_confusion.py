"""Run with `pytest`."""
# ruff: noqa: D103  # a test says what it is in its name

from typing import Any

import numpy as np
import pytest
from confusion import confusion

from ptpipe import StageError
from ptpipe.testing import Bench
from ptpipe_torch import Predictions

pytest_plugins = ["ptpipe.testing"]


def predictions(**metrics: Any) -> Predictions:
    return Predictions(np.array(["a"]), {"prediction": np.array([0])}, metrics)


def test_a_row_for_each_label(bench: Bench) -> None:
    table = bench.run(
        confusion, {}, predictions=predictions(class_names=["cat", "dog"], confusion=[[3, 1], [0, 2]], accuracy=5 / 6)
    )
    assert table.rows == [["label", "cat", "dog"], ["cat", "3", "1"], ["dog", "0", "2"]]


def test_other_tasks_have_no_classes(bench: Bench) -> None:
    with pytest.raises(StageError, match="needs the predictions of a classification"):
        bench.run(confusion, {}, predictions=predictions(r2=0.5))
