"""Columns: values in memory, rows of different lengths, subsets, and what a class of one's own must do.

Shape legend: B rows of a batch, L values of the longest one, V values of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe_torch import ArrayColumn, Column, RaggedColumn
from ptpipe_torch.data.column import SubsetColumn, flatten, value_range


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


def ragged(rows: Sequence[Sequence[int]], padding: int = -7, length: int | None = None) -> RaggedColumn:
    values_V = np.array([value for row in rows for value in row], dtype=np.int64)
    return RaggedColumn(values_V, np.cumsum([0, *map(len, rows)]), padding, length)


def padded(rows: Sequence[Sequence[int]], padding: int, length: int | None) -> list[list[int]]:
    """The reference: lists, filled up."""
    size = length if length is not None else max(map(len, rows), default=0)
    return [[*row, *[padding] * (size - len(row))] for row in rows]


class TestRagged:
    ROWS = ((4, 5, 6), (), (7,), (8, 9))

    @pytest.mark.parametrize("positions", [[0, 1, 2, 3], [3, 0], [2, 2, 1, 2], [1], [2], [1, 1]])
    def test_rows_are_padded_to_the_longest_one_taken(self, positions: list[int]) -> None:
        taken_BL = ragged(self.ROWS).take(np.array(positions))
        expected = padded([self.ROWS[position] for position in positions], -7, None)
        assert taken_BL.dtype == np.int64 and taken_BL.tolist() == expected
        assert taken_BL.shape == (len(positions), len(expected[0]))

    def test_rows_are_padded_to_a_length(self) -> None:
        assert ragged(self.ROWS, 0, length=5).take(np.array([2, 0])).tolist() == [[7, 0, 0, 0, 0], [4, 5, 6, 0, 0]]
        assert ragged(self.ROWS, 0, length=5).take(np.array([], dtype=np.int64)).shape == (0, 5)

    def test_nothing_is_taken(self) -> None:
        assert ragged(self.ROWS).take(np.array([], dtype=np.int64)).shape == (0, 0)
        assert len(ragged([])) == 0 and ragged([]).values().shape == (0, 0)
        assert ragged([[], []]).values().shape == (2, 0)

    def test_lengths_are_without_padding(self) -> None:
        column = ragged(self.ROWS)
        assert len(column) == 4 and column.lengths.tolist() == [3, 0, 1, 2]

    def test_what_was_taken_may_be_overwritten(self) -> None:
        column = ragged(self.ROWS)
        column.values_V.flags.writeable = False
        for taken_BL in (column.take(np.array([0])), column.take(np.array([0, 0])), column.values()):
            taken_BL[:] = 99
        assert column.values_V.tolist() == [4, 5, 6, 7, 8, 9]

    @pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32])
    def test_the_dtype_stays(self, dtype: type[np.generic]) -> None:
        column = RaggedColumn(np.array([1, 2, 3], dtype=dtype), np.array([0, 1, 3]), 0)
        assert column.values().dtype == dtype and column.values().tolist() == [[1, 0], [2, 3]]

    @settings(deadline=None)
    @given(st.data())
    def test_subsets_of_subsets_are_those_of_lists(self, data: st.DataObject) -> None:
        numbers = st.lists(st.integers(0, 9), max_size=6)
        expected = data.draw(st.lists(numbers, max_size=6))
        length = data.draw(st.sampled_from([None, 6, 9]))
        source = column = ragged(expected, -1, length)
        for _ in range(data.draw(st.integers(0, 3))):
            positions = data.draw(st.lists(st.integers(0, len(column) - 1), max_size=8)) if len(column) else []
            column = SubsetColumn(column, np.array(positions, dtype=np.int64))
            expected = [expected[position] for position in positions]
        assert column.values().tolist() == padded(expected, -1, length)
        order = data.draw(st.permutations(range(len(expected))))
        taken_BL = column.take(np.array(order, dtype=np.int64))
        assert taken_BL.tolist() == padded([expected[position] for position in order], -1, length)
        bottom, positions_N = flatten(column)
        assert bottom is source and isinstance(bottom, RaggedColumn)
        assert bottom.lengths[positions_N].tolist() == [len(row) for row in expected]


def test_the_range_of_values_is_found_in_parts() -> None:
    class Long(Column):
        """Reads no more rows at once than fit."""

        def __len__(self) -> int:
            return 5000

        def take(self, indices_B: np.ndarray) -> np.ndarray:
            assert len(indices_B) <= 1024
            return indices_B[:, None] - 3

    assert value_range(SubsetColumn(Long(), np.arange(4500))) == (-3, 4496)
    assert value_range(SubsetColumn(Long(), np.arange(0))) == (0, 0)
