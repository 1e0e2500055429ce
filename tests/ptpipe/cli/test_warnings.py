"""Warnings on a terminal: those of libraries and of a user's own network. pytest takes them in its own process."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import warnings
from ptpipe.cli import show_warnings_once

show_warnings_once()
for text in ("first", "first", "second", "first"):
    warnings.warn(text, FutureWarning)
    with warnings.catch_warnings(record=True) as caught:  # after it Python remembers nothing
        warnings.warn("caught", FutureWarning)
    assert len(caught) == 1
"""


def shown(*options: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, *options, "-c", SCRIPT]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    # From Python 3.13 on, the source line follows each warning, indented.
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("  ")]
    return [line.rpartition("FutureWarning: ")[2] for line in lines]


def test_each_is_shown_once() -> None:
    assert shown() == ["first", "second"]


def test_they_are_shown_as_often_as_python_is_told() -> None:
    assert shown("-W", "always") == ["first", "first", "second", "first"]
