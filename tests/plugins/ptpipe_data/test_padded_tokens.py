"""Token ids in arrays: `tokens` of data.arrays and data.python.

Shape legend: N samples, L tokens of the longest one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_data.config import ArraysConfig
from ptpipe_torch import Data, RaggedColumn, TokensInfo
from ptpipe_torch.data.column import flatten

LENGTHS = np.arange(40) % 6 + 2
PADDING = 1


def texts() -> dict[str, Any]:
    """Rows of 2 to 7 tokens in arrays of 9; ids are 2 to 49, and one is that of padding."""
    is_token_NL = np.arange(9) < LENGTHS[:, None]
    ids_NL = np.where(is_token_NL, np.random.default_rng(0).integers(2, 50, (40, 9)), PADDING)
    ids_NL[0, 0] = PADDING
    return {"ids": ids_NL, "mask": is_token_NL.astype(np.uint8), "label": np.arange(40) % 2}


@pytest.fixture
def load(tmp_path: Path, ctx: Context) -> Any:
    def load(content: dict[str, Any], **options: object) -> Data:
        np.savez(tmp_path / "texts.npz", **content)
        given = {
            "path": str(tmp_path / "texts.npz"), "inputs": ("ids", "mask"), "target": "label", "task": "classification",
            "tokens": {"ids": {"padding_id": PADDING}, "mask": {}},
        }  # fmt: skip
        return front.load_arrays(ArraysConfig.model_validate(given | options), ctx)

    return load


def test_batches_are_padded_to_their_longest_row(load: Any, events: Any, tmp_path: Path) -> None:
    content = texts()
    data = load(content, test_size=10)
    assert [str(spec) for spec in data.info.signature.inputs] == [
        "ids (batch, length) int64", "mask (batch, length) int64",
    ]  # fmt: skip
    ids, mask = data.info.inputs.values()
    assert ids == TokensInfo(vocabulary_size=int(content["ids"].max()) + 1, max_length=9, padding_id=PADDING)
    assert mask == TokensInfo(vocabulary_size=2, max_length=9)
    assert not events.notices
    (tmp_path / "stored").mkdir()
    data.save(tmp_path / "stored")
    for split in (*data.splits.values(), Data.load(tmp_path / "stored").splits["test"]):
        rows_N = np.array([int(name.rpartition("/")[2]) for name in split.ids])
        length = LENGTHS[rows_N].max()
        for name in ("ids", "mask"):
            assert np.array_equal(split.inputs[name].values(), content[name][rows_N, :length]), name
        shortest = np.array([LENGTHS[rows_N].argmin()])
        assert split.inputs["ids"].take(shortest).shape == (1, LENGTHS[rows_N].min())
    assert isinstance(flatten(data.splits["train"].inputs["ids"])[0], RaggedColumn)


def test_the_vocabulary_is_that_of_all_splits_or_given(load: Any, tmp_path: Path) -> None:
    content = texts()
    more = {name: array[:4].copy() for name, array in content.items()}
    more["ids"][0, 1] = 77
    np.savez(tmp_path / "more.npz", **more)
    assert load(content, test_path=str(tmp_path / "more.npz")).info.inputs["ids"].vocabulary_sizes == (78,)
    given = {"ids": {"padding_id": PADDING, "vocabulary_size": 900}, "mask": {}}
    assert load(content, tokens=given).info.inputs["ids"].vocabulary_sizes == (900,)
    given["ids"]["vocabulary_size"] = 40
    with pytest.raises(StageError, match="ids has the token id 49; the vocabulary has 40"):
        load(content, tokens=given)


def test_files_may_have_texts_of_other_lengths(load: Any, tmp_path: Path) -> None:
    content = texts()
    wider = {name: np.pad(array, ((0, 0), (0, 3)), constant_values=name == "ids") if array.ndim == 2 else array
             for name, array in content.items()}  # fmt: skip
    np.savez(tmp_path / "wider.npz", **wider)
    data = load(content, test_path=str(tmp_path / "wider.npz"))
    assert data.info.inputs["ids"].max_length == 12
    assert np.array_equal(data.splits["test"].inputs["ids"].values(), content["ids"][:, :7])


def test_rows_without_padding_are_reported(load: Any, events: Any) -> None:
    content = texts()
    content["ids"], content["mask"] = content["ids"][:, ::-1].copy(), content["mask"][:, ::-1].copy()
    load(content)
    assert [notice.partition("no row")[2] for notice in events.notices] == [
        " of ids ends with the padding 1, so each has 9 tokens: pad on the right, or set its padding_id"
    ]


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_])
def test_a_mask_that_is_not_among_the_tokens_is_reported(load: Any, events: Any, dtype: Any) -> None:
    content = texts()
    content |= {"mask": content["mask"].astype(dtype), "other": content["ids"] * 3 % 7, "wide": np.ones((40, 10), int)}
    content["scores"] = content["mask"].astype(np.float32)
    inputs = ("ids", "mask", "other", "wide", "scores")
    content["other"][:, -1] = np.arange(40)
    data = load(content, inputs=inputs, tokens={"ids": {"padding_id": PADDING}})
    assert data.info.inputs["mask"].spec("mask").shape == ("batch", 9)
    assert [notice.partition(".npz: ")[2] for notice in events.notices] == [
        "mask has one value at all padding of ids and is not in `tokens`, so its batches are not cut to the same "
        "length: name it there, too, if it describes the tokens, as a mask"
    ]


def test_nothing_is_reported_where_no_row_is_padded(load: Any, events: Any) -> None:
    content = {name: array[:, :2] if array.ndim == 2 else array for name, array in texts().items()}
    load(content, tokens={"ids": {"padding_id": PADDING}})
    assert not any("`tokens`" in notice for notice in events.notices)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"ids": np.ones((40, 9))}, {}, r"ids holds float32 of shape \(40, 9\), not ids of tokens"),
        ({"mask": np.ones((40, 8), np.int64)}, {}, r"different shapes: ids \(40, 9\), mask \(40, 8\)"),
        ({"ids": np.ones((40, 9), np.int64), "mask": np.zeros((40, 9), np.int64)}, {}, "row 0 of ids, mask is padding"),
        (
            {"mask": np.ones((40, 9), np.bool_)},
            {},
            r"mask holds truth values: store integers, and cast in the network \(`mask.bool\(\)`",
        ),
        ({}, {"inputs": ("mask",)}, "tokens: 'ids' is not among the inputs mask"),
    ],
)
def test_what_is_no_tokens(load: Any, changes: Any, options: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        load(texts() | changes, **options)


def test_padding_is_in_the_vocabulary(load: Any) -> None:
    with pytest.raises(ValueError, match="padding_id is not among the ids 0 to"):
        load(texts(), tokens={"ids": {"padding_id": 9, "vocabulary_size": 9}})
