from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from ptpipe_report.sanitize import one_line

ANY_TEXT = st.text(st.characters(categories=None))  # lone surrogates and control characters too


@given(ANY_TEXT)
def test_the_result_is_one_printable_line(text) -> None:
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert not [character for character in line if unicodedata.category(character) in {"Cc", "Cf", "Cs"}]
    assert one_line(line) == line
    line.encode("utf-8")


def test_an_escape_sequence_is_neutralized_and_not_silently_dropped() -> None:
    assert one_line("\x1b[2Jgone\r\nnext\ttab") == "\ufffd[2Jgone next tab"
    assert one_line("a\u202egnp.exe") == "agnp.exe"
