"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file's content; after a crash it holds the old or the new, whole."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:  # not tempfile: whoever may read the folder may read the file
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, safe from a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
