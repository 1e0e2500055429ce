"""Columns: values in memory, subsets of them, and what a class of one's own must do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe_torch import ArrayColumn, Column
from ptpipe_torch.data.column import SubsetColumn, flatten


class Squares(Column):
    """A class of one's own, with no more than it must have."""

    def __len__(self) -> int:
        return 6

    def take(self, indices_B: np.ndarray) -> np.ndarray:
        return indices_B**2


def some_array(num: int = 6) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num, 2, 3)).astype(np.float32)


@pytest.mark.parametrize("indices", [[], [0], [5, 0, 0, 3]])
def test_an_array_gives_its_rows(indices: list[int]) -> None:
    array = some_array()
    taken = ArrayColumn(array).take(np.array(indices, dtype=np.int64))
    assert taken.dtype == array.dtype and taken.shape == (len(indices), 2, 3)
    np.testing.assert_array_equal(taken, array[indices])


def test_what_was_taken_may_be_overwritten() -> None:
    array = some_array()
    array.flags.writeable = False
    column = ArrayColumn(array)
    for taken in (column.take(np.arange(6)), column.values(), SubsetColumn(column, np.arange(6)).values()):
        taken[:] = 0
        assert array.any()


def test_a_class_of_ones_own_has_values_and_subsets() -> None:
    assert Squares().values().tolist() == [0, 1, 4, 9, 16, 25]
    assert SubsetColumn(Squares(), np.array([5, 1])).values().tolist() == [25, 1]


def test_both_methods_must_be_there() -> None:
    class NoLength(Column):
        def take(self, indices_B: np.ndarray) -> np.ndarray:
            return indices_B

    with pytest.raises(TypeError, match="__len__"):
        NoLength()


@settings(deadline=None)
@given(st.data())
def test_a_subset_of_a_subset_is_flattened(data: st.DataObject) -> None:
    column: Column = ArrayColumn(some_array())
    source, expected = column, column.values()
    for _ in range(data.draw(st.integers(0, 4))):
        positions = data.draw(st.lists(st.integers(0, len(column) - 1), max_size=8)) if len(column) else []
        column, expected = SubsetColumn(column, np.array(positions, dtype=np.int64)), expected[positions]
    assert len(column) == len(expected)
    np.testing.assert_array_equal(column.values(), expected)
    bottom, positions_N = flatten(column)
    assert bottom is source and positions_N.dtype == np.int64
    np.testing.assert_array_equal(bottom.take(positions_N), expected)


def test_subsets_share_their_source() -> None:
    column = ArrayColumn(some_array())
    one, other = (SubsetColumn(column, np.array(positions)) for positions in ([1, 2], [3]))
    assert flatten(one)[0] is flatten(other)[0] is column
