"""What ptpipe prints of others' text moves no cursor, sets no clipboard, and hides and reverses nothing."""

from __future__ import annotations

import unicodedata
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError, model_validator

from ptpipe import one_line
from ptpipe.printable import error_text, first_line

ANY_TEXT = st.text(st.characters(categories=None))  # lone surrogates and control characters too


@given(ANY_TEXT)
def test_the_result_is_one_printable_line(text) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert not [character for character in line if unicodedata.category(character)[0] == "C"]
    assert one_line(line) == line
    line.encode("utf-8")


@given(st.text(st.characters(categories=["L", "N", "P", "S"], max_codepoint=0x10FF)))
def test_what_a_reader_sees_stays(text) -> None:
    assert one_line(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\x1b[2Jgone\r\nnext\ttab", "\\x1b[2Jgone next tab"),
        ("\x1b]52;c;cm0gLXJm\x07", "\\x1b]52;c;cm0gLXJm\\x07"),
        ("\x9b2J\x7f\0", "\\x9b2J\\x7f\\x00"),
        ("a\u202egnp.exe", "a\\u202egnp.exe"),
        ("a\u200bb\u2066c\ufeff\xad", "a\\u200bb\\u2066c\\ufeff\\xad"),
        ("\ue000 \U000e0041 \u0378 \udcff", "\\ue000 \\U000e0041 \\u0378 \\udcff"),
        ("\u3164\u2800\U000e0100\ufe0f", "\\u3164\\u2800\\U000e0100\\ufe0f"),
        ("a  b\xa0c\u2028d ", "a  b c d"),
        ("  indented", "  indented"),
    ],
)
def test_what_a_reader_cannot_see_is_escaped(text, line) -> None:
    assert one_line(text) == line


def test_a_long_text_takes_linear_time() -> None:
    assert len(one_line((" " * 1000 + "\x1b") * 1000)) == 1_004_000


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_the_first_line_of_any_error() -> None:
    assert first_line(ValueError(" one\n two")) == "one"
    assert first_line(ValueError()) == ""
    assert first_line(MuteError()) == error_text(MuteError()) == "<its __str__ raised ValueError>"
    assert error_text(ValueError(" one\n two")) == " one\n two"


class Point(BaseModel):
    place: tuple[int, ...] = ()
    weight: float

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise ValueError("no such point\nin space")


def test_the_reason_is_in_the_line_where_a_class_puts_it_below_the_first() -> None:
    with pytest.raises(ValidationError) as raised:
        Point.model_validate({"place": ["x", "y"]})
    bad = "Input should be a valid integer, unable to parse string as an integer"
    assert first_line(raised.value) == f"Point: place: 0: {bad}; place: 1: {bad}; weight: Field required"
    with pytest.raises(ValidationError) as raised:
        Point.model_validate({"place": "abcd", "weight": 1})
    assert first_line(raised.value) == "Point: place: Input should be a valid tuple"
    with pytest.raises(ValidationError) as raised:
        Point.model_validate({"place": [*"abcde"], "weight": 1})
    assert first_line(raised.value).endswith(f"; place: 2: {bad}; and 2 more")
    with pytest.raises(ValidationError) as raised:
        Point(weight=1)
    assert first_line(raised.value) == "Point: no such point"
