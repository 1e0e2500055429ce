"""Columns: where the values of a split's named inputs and targets come from.

Shape legend: N samples, B of a batch, L values of its longest row, V values of all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PART_ROWS = 1024


class Column(ABC):
    """The values of one input or target, a row for each sample.

    A class of one's own needs no more than the two abstract methods: where its data set is stored, the values are read
    once and kept as an array, so its rows have one shape. Those of a `RaggedColumn` may differ in length.
    """

    @abstractmethod
    def __len__(self) -> int:
        """N."""

    @abstractmethod
    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the values of the samples `indices_B`, of shape (B, ...), as a new writable array."""

    def values(self) -> npt.NDArray[Any]:
        """Return the values of all samples, of shape (N, ...)."""
        import numpy as np

        return self.take(np.arange(len(self)))

    def blocks(self) -> npt.NDArray[np.int64] | None:
        """Return the number of the block that each row lies in, (N,): a file that is read faster in order.

        None: rows are read as fast in any order.
        """
        return None

    @property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        """The number of values of each row, (N,), where rows are padded; None: they aren't."""
        return None


@dataclass(frozen=True, eq=False)
class ArrayColumn(Column):
    """Values in memory, or mapped from a file."""

    array_N: npt.NDArray[Any]
    """Of shape (N, ...)."""

    def __len__(self) -> int:
        return len(self.array_N)

    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return self.array_N.take(indices_B, axis=0)


@dataclass(frozen=True, eq=False)
class RaggedColumn(Column):
    """Rows of different lengths, such as token ids, that are padded on the right."""

    values_V: npt.NDArray[Any]
    """The values of all rows, one row after the other."""
    offsets_N: npt.NDArray[np.int64]
    """(N + 1,): row i is `values_V[offsets_N[i] : offsets_N[i + 1]]`."""
    padding: int
    """What fills a row."""
    length: int | None = None
    """What rows are padded to; None: the longest one of those taken together."""

    def __len__(self) -> int:
        return len(self.offsets_N) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each row, without padding."""
        import numpy as np

        return np.diff(self.offsets_N)

    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the rows, of shape (B, L)."""
        import numpy as np

        starts_B = self.offsets_N[indices_B]
        lengths_B = self.offsets_N[indices_B + 1] - starts_B
        columns_L = np.arange(self.length or lengths_B.max(initial=0))
        is_value_BL = columns_L < lengths_B[:, None]
        rows_BL = np.full(is_value_BL.shape, self.padding, dtype=self.values_V.dtype)
        rows_BL[is_value_BL] = self.values_V[(starts_B[:, None] + columns_L)[is_value_BL]]
        return rows_BL


@dataclass(frozen=True, eq=False)
class SubsetColumn(Column):
    """Some rows of a column that several subsets share."""

    source: Column
    positions_N: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.positions_N)

    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return self.source.take(self.positions_N[indices_B])

    def blocks(self) -> npt.NDArray[np.int64] | None:
        blocks_N = self.source.blocks()
        return None if blocks_N is None else blocks_N[self.positions_N]

    @property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        lengths_N = self.source.lengths
        return None if lengths_N is None else lengths_N[self.positions_N]


def flatten(column: Column) -> tuple[Column, npt.NDArray[np.int64]]:
    """Resolve nested subsets: return the column at the bottom, and the positions of the samples in it."""
    import numpy as np

    if not isinstance(column, SubsetColumn):
        return column, np.arange(len(column), dtype=np.int64)
    source, positions_N = flatten(column.source)
    return source, positions_N[column.positions_N]


def value_range(column: Column) -> tuple[int, int]:
    """Return the smallest and the largest of 0 and a column's integers, its padding included where that is read."""
    source, rows_N = flatten(column)
    # In parts: padding of all rows at once to the longest may be large, and so may a column that is read from disk.
    parts = (
        [source.values_V]
        if isinstance(source, RaggedColumn)
        else (source.take(rows_N[start : start + _PART_ROWS]) for start in range(0, len(rows_N), _PART_ROWS))
    )
    ranges = [(int(part.min(initial=0)), int(part.max(initial=0))) for part in parts]
    return min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)
