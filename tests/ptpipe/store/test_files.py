"""Files are replaced whole, and JSON is JSON."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe.store.files import strict_json, write_atomically

ANY_TEXT = st.text(st.characters())  # surrogates too


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_may_be_read_by_whoever_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_the_old_content_survives_a_failure(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, b"one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path], "and nothing is left lying about"


def test_what_json_has_not_becomes_words():
    text = strict_json({"a": float("nan"), "b": [float("inf"), -float("inf"), 1.5], "c": ("x", None)})
    read = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert read == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5], "c": ["x", None]}


def test_an_undecodable_file_name_is_kept():
    assert json.loads(strict_json({"\udcff": [Path("\udcff"), float("nan")]})) == {"\udcff": ["\udcff", "NaN"]}


@given(
    st.recursive(st.none() | st.floats() | ANY_TEXT, lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner))
)
def test_json_is_always_strict(value):
    json.loads(strict_json(value), parse_constant=lambda word: pytest.fail(word))
