"""Errors of libraries in one line."""

from __future__ import annotations

_MAX_LENGTH = 300


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something, or its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:_MAX_LENGTH]
