"""Facts about texts as token ids.

Shape legend: B texts of a batch, L tokens of its longest one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from ptpipe import StageError
from ptpipe_torch.data.column import Column, value_range
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.data.meaning import OTHER_WORDS, Misfit
from ptpipe_torch.model.signature import BATCH, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LENGTH: Final = "length"
"""The symbol of the axis of tokens, where batches are padded to their longest text."""
_LIMIT = re.compile(r"at most (\d{1,9}) in a text", re.ASCII)


class TokensInfo(ColumnInfo):
    """Token ids, int64 (B, L), padded on the right with `padding_id`."""

    vocabulary_size: int = Field(ge=2)
    max_length: PositiveInt
    """Of a text, in tokens; longer ones were truncated."""
    padding_id: NonNegativeInt = 0
    """The id of padding, which no token of a text has."""
    padding: Literal["longest", "max_length"] = "longest"
    """What a batch is padded to: its longest text, or `max_length`."""
    tokenizer_sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """Of the `tokenizer.json` that made the ids, without its truncation and padding; empty where none did."""

    @model_validator(mode="after")
    def _has_padding(self) -> Self:
        if self.padding_id >= self.vocabulary_size:
            raise ValueError("padding_id is not in the vocabulary")
        return self

    @property
    def vocabulary_sizes(self) -> tuple[int, ...]:
        return (self.vocabulary_size,)

    @property
    def meaning(self) -> tuple[str, ...]:
        tokenizer = (f"tokenizer {self.tokenizer_sha256}",) if self.tokenizer_sha256 else ()
        return (*tokenizer, f"{self.vocabulary_size} tokens", f"at most {self.max_length} in a text")

    def misfit(self, words: Sequence[str], *, retrained: bool = False) -> Misfit | None:
        """Texts may be shorter than the model's; former models have no limit."""
        limit = _LIMIT.fullmatch(words[-1])
        found, (*needed, own_limit) = [*words[: -1 if limit else None]], self.meaning
        if found != needed:
            return Misfit(found, needed, OTHER_WORDS)
        if limit is None or int(limit[1]) >= self.max_length:
            return None
        return Misfit(words[-1:], [own_limit], "the model takes no longer ones. Use the same `max_length` for both")

    @property
    def length(self) -> int | Literal["length"]:
        """The size of the axis of tokens, of inputs and of targets that each token has."""
        return LENGTH if self.padding == "longest" else self.max_length

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, "int64", (BATCH, self.length))

    def check_values(self, name: str, column: Column) -> None:
        """Raise StageError where a token is not in the vocabulary."""
        for token_id in value_range(column):
            if not 0 <= token_id < self.vocabulary_size:
                raise StageError(f"{name} has the token id {token_id}; the vocabulary has {self.vocabulary_size}")


def before_padding(ids: Mapping[str, npt.NDArray[Any]], padding_ids: Mapping[str, int]) -> npt.NDArray[np.bool_]:
    """Return which places are a token or stand before one, (B, L): a text ends where all inputs have padding only.

    `ids`: of inputs, or masks, that describe the same tokens, (B, L). `padding_ids`: of each.
    """
    import numpy as np

    is_token_BL = np.any([ids[name] != padding_id for name, padding_id in padding_ids.items()], axis=0)
    reached_BL: npt.NDArray[np.bool_] = np.logical_or.accumulate(is_token_BL[:, ::-1], axis=1)[:, ::-1]
    return reached_BL
