"""Errors of libraries in one line."""

from __future__ import annotations

import re

_MAX_LENGTH = 300
_CONSTANT_AXIS = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something, or its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:_MAX_LENGTH]


def export_failure(error: BaseException, *, remedy: str = "") -> str:
    """Return why `torch.export`, or what follows it, refused a network: its first cause, in one line.

    `remedy`: for an axis whose size the network makes a constant, another one than to write `x.shape[0]`.
    """
    constant = _CONSTANT_AXIS.search(str(error))
    if constant is not None:
        advice = f"write x.shape[0]{remedy and f', or {remedy}'}"
        return f"it makes a constant of the size of the axis {constant[1]}, as len(x) and int(x.shape[0]) do: {advice}"
    while error.__cause__ is not None:
        error = error.__cause__
    line = "".join(char if char.isprintable() else " " for char in first_line(error))
    return line if line == type(error).__name__ else f"{type(error).__name__}: {line}"
