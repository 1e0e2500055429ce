"""What is shown of a library's error."""

from __future__ import annotations

import pytest

from ptpipe_torch.errors import first_line


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n \n  three  \nfour"), "three"),
        (ValueError(), "ValueError"),
        (KeyError(""), "''"),
        (RuntimeError(" \n"), "RuntimeError"),
        (RuntimeError("x" * 1000), "x" * 300),
    ],
)
def test_the_first_line_that_says_something(error: Exception, shown: str) -> None:
    assert first_line(error) == shown
