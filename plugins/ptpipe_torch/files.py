"""Files that somebody else put there: opened without waiting for what is no file."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


class NotAFileError(OSError):
    """The path names a pipe, a device or the like."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises NotAFileError where the path names no regular file: opening a named pipe waits for a writer, and a device
    such as /dev/zero never ends.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  # Path.open takes no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFileError(errno.EINVAL, "not a regular file", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
