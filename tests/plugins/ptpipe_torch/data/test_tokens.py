"""Facts about token ids, and what their values may be.

Shape legend: B texts of a batch, L tokens of the longest one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, RaggedColumn, TokensInfo
from ptpipe_torch.data.column import SubsetColumn
from ptpipe_torch.data.column_info import ColumnInfo

INFO = TokensInfo(vocabulary_size=10, max_length=6, padding_id=3, tokenizer_sha256="0f" * 32)


def column(*ids: int) -> RaggedColumn:
    return RaggedColumn(np.array(ids, dtype=np.int64), np.array([0, 1, len(ids)]), 3)


def test_the_axis_of_tokens_is_a_symbol_or_max_length() -> None:
    assert str(INFO.spec("tokens")) == "tokens (batch, length) int64" and INFO.length == "length"
    fixed = INFO.model_copy(update={"padding": "max_length"})
    assert str(fixed.spec("tokens")) == "tokens (batch, 6) int64" and fixed.length == 6
    assert INFO.vocabulary_sizes == (10,)


def test_the_facts_are_stored() -> None:
    assert ColumnInfo.from_json(INFO.to_json()) == INFO


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"padding_id": 10}, "padding_id is not in the vocabulary"),
        ({"padding_id": -1}, "greater than or equal to 0"),
        ({"vocabulary_size": 1, "padding_id": 0}, "greater than or equal to 2"),
        ({"max_length": 0}, "greater than 0"),
        ({"tokenizer_sha256": "0F" * 32}, "match pattern"),
        ({"tokenizer_sha256": "0f"}, "match pattern"),
        ({"padding": "shortest"}, "'longest' or 'max_length'"),
    ],
)
def test_facts_that_can_not_be(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TokensInfo(**{"vocabulary_size": 10, "max_length": 6} | facts)


@pytest.mark.parametrize("token", [-1, 10, 2**62])
def test_a_token_outside_of_the_vocabulary_is_refused(token: int) -> None:
    for of in (column(0, token, 9), ArrayColumn(np.array([[0, token], [9, 0]]))):
        with pytest.raises(StageError, match=rf"^split val: tokens has the token id {token}; the vocabulary has 10$"):
            INFO.check_values("split val: tokens", of)


def test_every_token_of_the_vocabulary_is_one() -> None:
    for of in (column(0, 9), column(), ArrayColumn(np.array([[0, 9]])), SubsetColumn(column(9, 0), np.array([1]))):
        INFO.check_values("split val: tokens", of)


def test_values_are_checked_where_rows_are_too_long_to_be_padded_together() -> None:
    """10^5 texts, one of them of 10^5 tokens: together they would be 80 GB."""
    lengths_N = np.ones(100_000, dtype=np.int64)
    lengths_N[7] = 100_000
    offsets_N = np.concatenate([[0], np.cumsum(lengths_N)])
    INFO.check_values("tokens", RaggedColumn(np.full(offsets_N[-1], 9), offsets_N, 3))


def test_a_batch_becomes_a_tensor_as_it_is() -> None:
    batch_BL = torch.from_numpy(column(4, 5, 6).values())
    assert INFO.conversion("tokens")(batch_BL, True).tolist() == [[4, 3], [5, 6]]
    fixed = INFO.model_copy(update={"padding": "max_length"})
    with pytest.raises(StageError, match=r"^column tokens: a batch of shape \(2, 2\) int64, which is not tokens"):
        fixed.conversion("tokens")(batch_BL, False)
    with pytest.raises(StageError, match=r"^column tokens: a batch of shape \(2, 2\) int32"):
        INFO.conversion("tokens")(batch_BL.int(), False)


def test_a_model_takes_shorter_texts_but_no_longer_ones() -> None:
    *words, limit = INFO.meaning
    shorter, longer = (INFO.model_copy(update={"max_length": INFO.max_length + more}) for more in (-1, 1))
    assert shorter.misfit(INFO.meaning) is INFO.misfit(words) is None, "former models have no limit"
    misfit = longer.misfit(INFO.meaning)
    assert misfit is not None and (misfit.found, misfit.needed) == ((limit,), [longer.meaning[-1]])
    assert misfit.problem == "the model takes no longer ones. Use the same `max_length` for both"
    other = shorter.model_copy(update={"vocabulary_size": 11}).misfit(INFO.meaning)
    assert other is not None and "the same numbers stand for something else" in other.problem
