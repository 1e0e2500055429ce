"""What an attack is: a file or folder that a stranger made, what reads it, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attack:
    """One attack. A new kind of data (tables, tokenizers) needs a loader in `loaders.py` and a list of these."""

    name: str
    make: Callable[[Path], object]
    """Writes the stranger's files into an empty folder."""
    load: str
    """Name of a function in `loaders.py`, which reads the folder as ptpipe does."""
    expect: str | None
    """Pattern of the error's type and text, `StageError: ... can't be read`; None: it is read, and nothing happens."""
    peak_mb: int = 150
    """How much the process may grow."""
    limit_s: int = 10
    prints: str = ""
    """Pattern of what a C library writes to stderr, where nothing can keep it from that."""
    is_thorough: bool = False
    """Takes too long, or too much disk, for every `make test`."""
