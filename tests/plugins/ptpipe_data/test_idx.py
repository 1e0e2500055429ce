from __future__ import annotations

import gzip
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptpipe import StageError
from ptpipe_data.idx import gunzip, parse_idx


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    header = bytes([0, 0, kind, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


ARRAYS = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6))


@settings(deadline=None)
@given(ARRAYS)
def test_round_trip(array: np.ndarray) -> None:
    parsed = parse_idx(idx_bytes(array), "x")
    assert parsed.shape == array.shape
    np.testing.assert_array_equal(parsed, array)


@settings(deadline=None)
@given(ARRAYS, st.data())
def test_every_truncation_is_refused(array: np.ndarray, data: st.DataObject) -> None:
    content = idx_bytes(array)
    end = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(StageError, match=r"^some/file "):
        parse_idx(content[:end], "some/file")


@settings(deadline=None)
@given(ARRAYS, st.binary(min_size=1, max_size=9))
def test_surplus_is_refused(array: np.ndarray, surplus: bytes) -> None:
    with pytest.raises(StageError, match="longer than its header says"):
        parse_idx(idx_bytes(array) + surplus, "x")


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_anything_else_is_a_stage_error_or_an_array(content: bytes) -> None:
    try:
        parsed = parse_idx(content, "x")
    except StageError:
        return
    assert idx_bytes(parsed) == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x89PNG\r\n", "starts with 89 50 4e 47, not with 00 00"),
        (bytes([0, 0, 0x0D, 1, 0, 0, 0, 0]), "IDX type 0x0d; only unsigned bytes"),
        (bytes([0, 0, 8, 3, 0, 0]), "is truncated: it ends inside the header"),
        (bytes([0, 0, 8, 200]) + bytes(800), "is damaged: its header announces an array of 200 dimensions"),
        (bytes([0, 0, 8, 4, 0, 0, 0, 0]) + b"\xff" * 12, "is damaged: its header announces an array of 4 dimensions"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"123", "4294967295 x 4294967295 x 4294967295 = "),
    ],
)
def test_malformed_content(content: bytes, message: str) -> None:
    with pytest.raises(StageError, match=re.escape(message)):
        parse_idx(content, "x")


@settings(deadline=None)
@given(st.binary(max_size=2000), st.data())
def test_gzip_altered_anywhere_is_refused_or_harmless(content: bytes, data: st.DataObject) -> None:
    packed = bytearray(gzip.compress(content, mtime=0))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    try:
        unpacked = gunzip(bytes(packed), "x.gz")
    except StageError:
        return
    assert unpacked == content  # some bits mean nothing: the header's time, what is left of the last byte of data


def test_gzip_errors_name_the_file_and_the_reason() -> None:
    packed = gzip.compress(b"abc" * 1000)
    with pytest.raises(StageError, match=r"^a/b\.gz is truncated: the compressed data has no end$"):
        gunzip(packed[:-1], "a/b.gz")
    with pytest.raises(StageError, match=r"^a/b\.gz is damaged: incorrect data check$"):
        gunzip(packed[:-5] + b"\0" + packed[-4:], "a/b.gz")
    with pytest.raises(StageError, match=r"^a/b\.gz is damaged: incorrect header check$"):
        gunzip(b"no gzip at all", "a/b.gz")
    with pytest.raises(StageError, match=r"^a/b\.gz is damaged: 4 bytes follow"):
        gunzip(packed + b"more", "a/b.gz")
