"""The line of a network's own code that is running."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any

import torch

TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
"""No file in it has code of a network's own."""


def running_line(internal: tuple[str, ...]) -> str:
    """Return the innermost line that is executed outside of the folders `internal`: `net.py:12: `x = f(x)``."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(internal):
        frame = frame.f_back
    if frame is None:
        return ""
    return described_line(frame.f_code.co_filename, frame.f_lineno)


def described_line(path: str, number: int) -> str:
    """Return a line as `net.py:12: `x = f(x)``; without its code, where that is not known."""
    # Python 3.13 keeps the code of `python -c` under the name that all code of `exec` has.
    code = "" if path == "<string>" else linecache.getline(path, number).strip()
    return f"{path}:{number}: `{code}`" if code else f"{path}:{number}"
