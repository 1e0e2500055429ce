"""What is shown of a library's error."""

from __future__ import annotations

import pytest

from ptpipe_torch.errors import export_failure, first_line


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


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


CONSTANT = ValueError("You marked batch as dynamic but your code specialized it to be a constant (2). If you ...")


@pytest.mark.parametrize(
    ("error", "remedy", "shown"),
    [
        (caused(RuntimeError("outer"), caused(TypeError("middle"), KeyError("inner"))), "", "KeyError: 'inner'"),
        (ValueError(), "", "ValueError"),
        (ValueError("a\x1b[31mred"), "", "ValueError: a [31mred"),
        (CONSTANT, "", "as int(x.shape[0]) and torch.take_along_dim do: write x.shape[0], and x.gather in its place"),
        (CONSTANT, "set max_batch_size: 1", "write x.shape[0], and x.gather in its place, or set max_batch_size: 1"),
    ],
)
def test_why_an_export_failed(error: Exception, remedy: str, shown: str) -> None:
    found = export_failure(error, remedy=remedy)
    assert found.endswith(shown)
    assert found == shown or found.startswith("it makes a constant of the size of the axis batch, ")
