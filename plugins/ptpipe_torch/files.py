"""Files that somebody else put there, opened without waiting for what is no file, and those that a failure leaves."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path, PurePosixPath


class NotAFileError(OSError):
    """The path names a pipe, a device or the like."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises NotAFileError where the path names no regular file: opening a named pipe waits for a writer, and a device
    such as /dev/zero never ends.
    """
    return _opened(str(path))


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the hex digest of a file's content; `algorithm` as hashlib names it. Raises OSError, naming the file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def open_beneath(folder: Path, location: str) -> BufferedReader:
    """Open a file in a folder, or in one inside it, for reading. A stranger may have chosen its path.

    Raises ValueError for a path that is absolute or has `..`, NotAFileError where a symbolic link is on it or where it
    names no regular file.
    """
    parts = PurePosixPath(location).parts
    if not parts:
        raise ValueError("it names no file")
    if ".." in parts or location.startswith("/"):
        raise ValueError("it leads out of the folder")
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            _check_no_link(part, directory)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        _check_no_link(parts[-1], directory)
        return _opened(parts[-1], os.O_NOFOLLOW, directory)
    finally:
        os.close(directory)


def _check_no_link(name: str, directory: int) -> None:
    """Raise NotAFileError for a symbolic link: one that is put there later, O_NOFOLLOW refuses, in other words."""
    if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise NotAFileError(errno.ELOOP, "a symbolic link is on its path", name)


def _opened(path: str, flags: int = 0, directory: int | None = None) -> BufferedReader:
    file = open(path, "rb", opener=partial(_without_waiting, more=flags, directory=directory))  # noqa: SIM115  # Path.open takes no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFileError(errno.EINVAL, "not a regular file", path)
    return file


@contextmanager
def emptied_on_error(folder: Path) -> Iterator[None]:
    """Delete what is in a folder if the `with` raises: a stage that never resumes needs nothing of what it wrote."""
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        raise


def _without_waiting(path: str, flags: int, more: int, directory: int | None) -> int:
    return os.open(path, flags | more | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=directory)
