"""Facts about texts as token ids.

Shape legend: B texts of a batch, L tokens of its longest one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.model.signature import BATCH, TensorSpec

LENGTH = "length"


class TokensInfo(ColumnInfo):
    """Token ids, int64 (B, L), padded on the right with `padding_id`."""

    vocabulary_size: int = Field(ge=2)
    max_length: PositiveInt
    padding_id: NonNegativeInt = 0
    padding: Literal["longest", "max_length"] = "longest"

    @property
    def vocabulary_sizes(self) -> tuple[int, ...]:
        return (self.vocabulary_size,)

    @property
    def length(self) -> int | str:
        return LENGTH if self.padding == "longest" else self.max_length

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, "int64", (BATCH, self.length))
