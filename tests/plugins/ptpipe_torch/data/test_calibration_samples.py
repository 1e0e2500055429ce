"""Calibration samples of no use are refused, and what can't be is not.

Shape legend: N samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, ArrayInfo, Column, Data, DatasetInfo, RaggedColumn, Regression, Split
from ptpipe_torch.data.calibration_samples import check_finite, num_calibration_samples


def data_of(*columns: Column) -> Data:
    """The columns as inputs x0, x1 and so on of the split train."""
    ids_N = np.array([f"file/{number:02d}" for number in range(len(columns[0]))])
    targets = {"targets": ArrayColumn(np.zeros((len(ids_N), 1), np.float32))}
    inputs = {f"x{number}": column for number, column in enumerate(columns)}
    infos = {name: ArrayInfo(dtype="float32", shape=(2,)) for name in inputs}
    return Data(
        DatasetInfo("rows", infos, Regression(target_names=("y",), mean=(0.0,), std=(1.0,))),
        {"train": Split(ids_N, inputs, targets)},
    )


def rows(*values: float) -> ArrayColumn:
    """Rows of two equal values."""
    return ArrayColumn(np.repeat(np.array(values, np.float32)[:, None], 2, axis=1))


def refused(message: str, data: Data, max_samples: int | None = None) -> None:
    with pytest.raises(StageError, match=message) as raised:
        num_calibration_samples("quant.test", data, "train", max_samples)
    assert str(raised.value).startswith("quant.test: ")


def test_fewer_than_two_samples_are_refused() -> None:
    refused("train has 1 sample, and ranges need two at least .* calibration_size", data_of(rows(1)))
    with pytest.raises(StageError, match="calibration has 0 samples"):
        num_calibration_samples("quant.test", data_of(rows(1, 2)), "calibration", None)


def test_samples_that_are_all_the_same_are_refused() -> None:
    refused(
        r"all 3 samples of train are the same \(x0 is 0.5 throughout\): calibrate on real", data_of(rows(*[0.5] * 3))
    )
    refused(
        r"are the same \(x1 is 4.0 throughout\)", data_of(ArrayColumn(np.tile([[1.0, 2.0]], (5, 1))), rows(*[4] * 5))
    )
    refused("all 3 samples of train are the same", data_of(rows(7, 7, 7, 1)), 3)
    refused("are the same: ", data_of(RaggedColumn(np.zeros(0, np.int64), np.zeros(4, np.int64), 0)))


@pytest.mark.parametrize("columns", [[rows(0, 0, 0, 1)], [rows(1, 1, 1, 1), rows(3, 3, 2, 3)]], ids=["last", "second"])
def test_one_sample_that_differs_is_enough(columns: list[Column]) -> None:
    assert num_calibration_samples("quant.test", data_of(*columns), "train", None) == 4
    assert num_calibration_samples("quant.test", data_of(rows(1, 2, 3)), "train", 2) == 2


def test_two_samples_are_read_where_they_differ() -> None:
    class Counted(ArrayColumn):
        read: list[int] = []  # noqa: RUF012

        def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            self.read.extend(indices_B.tolist())
            return super().take(indices_B)

    column = Counted(rows(*range(100)).array_N)
    assert num_calibration_samples("quant.test", data_of(column), "train", None) == 100
    assert column.read == [0, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sample_that_is_not_finite_is_named(value: float) -> None:
    data = data_of(rows(1, 2, 3, 4), rows(1, 2, value, 4))
    first, second = data.batches("train", batch_size=2)
    check_finite("quant.test", data, "train", first)
    with pytest.raises(StageError, match=r"^quant\.test: x1 of file/02 \(split train\) is not finite: mend the data"):
        check_finite("quant.test", data, "train", second)
