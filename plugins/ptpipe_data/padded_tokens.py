"""Token ids in arrays, of which the padding is left out: a batch is padded to its longest row.

Shape legend: N samples, L tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_torch import RaggedColumn, Split, TokensInfo
from ptpipe_torch.data.tokens import before_padding

if TYPE_CHECKING:
    from ptpipe_data.config import TokensConfig


def without_padding(name: str, split: Split, tokens: Mapping[str, TokensConfig]) -> Split:
    """Return a split whose rows of tokens end at the last position where one of these inputs is no padding.

    `name`: of the file or function, for errors. Raises StageError for arrays that are no ids, (N, L) alike.
    """
    if not tokens:
        return split
    arrays = {own: _ids(name, own, split.inputs[own].values()) for own in tokens}
    shapes = {own: array.shape for own, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{own} {shape}" for own, shape in shapes.items())
        raise StageError(f"{name}: inputs of tokens have different shapes: {found}; they describe the same tokens")
    is_kept_NL = before_padding(arrays, {own: of.padding_id for own, of in tokens.items()})
    lengths_N = is_kept_NL.sum(axis=1)
    if not lengths_N.all():
        row = int((lengths_N == 0).argmax())
        raise StageError(f"{name}: row {row} of {', '.join(tokens)} is padding alone: leave it out")
    offsets_N = np.concatenate([[0], lengths_N.cumsum()]).astype(np.int64)
    columns = {
        own: RaggedColumn(array_NL[is_kept_NL].astype(np.int64), offsets_N, tokens[own].padding_id)
        for own, array_NL in arrays.items()
    }
    return replace(split, inputs={**split.inputs, **columns})


def describing_tokens(split: Split, without: Split, tokens: Mapping[str, TokensConfig]) -> list[str]:
    """Return the inputs, not among `tokens`, that have a place for each token and one value at all padding.

    `split`: all arrays as they are. `without`: what `without_padding` made of it.
    """
    if not tokens:
        return []
    name = next(iter(tokens))
    shape_NL, lengths_N = split.inputs[name].values().shape, _ragged(without, name).lengths
    is_padding_NL = np.arange(shape_NL[1]) >= lengths_N[:, None]
    others = {own: of.values() for own, of in split.inputs.items() if own not in tokens}
    return [
        own
        for own, array in others.items()
        if array.shape == shape_NL and array.dtype.kind in "biu" and len(np.unique(array[is_padding_NL])) == 1
    ]


def tokens_info(name: str, splits: Mapping[str, Split], config: TokensConfig, max_length: int) -> TokensInfo:
    """Return the facts about the input `name` of all splits."""
    largest = max(int(_ragged(split, name).values_V.max()) for split in splits.values())
    size = config.vocabulary_size or 1 + max(1, largest, config.padding_id)
    return TokensInfo(vocabulary_size=size, max_length=max_length, padding_id=config.padding_id)


def _ragged(split: Split, name: str) -> RaggedColumn:
    column = split.inputs[name]
    assert isinstance(column, RaggedColumn)
    return column


def _ids(name: str, own: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind == "b":
        raise StageError(f"{name}: {own} holds truth values: store integers, and cast in the network (`{own}.bool()`)")
    if array.dtype.kind not in "iu" or array.ndim != 2:
        raise StageError(
            f"{name}: {own} holds {array.dtype} of shape {array.shape}, not ids of tokens: integers (N, L)"
        )
    return array
