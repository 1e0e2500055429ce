"""Files that code opens for reading, as Python's audit events tell."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, Self

_CODE = (".py", ".pyc", ".so", ".pyd")
"""What imports open: modules count by their code, which other parts of a result know."""
_open_logs: list[ReadLog] = []


class ReadFile(NamedTuple):
    """A file that was read, as it was then."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    """Unlike mtime it can't be set, so a file with a restored mtime is noticed."""
    inode: int
    sha256: str = ""
    """Of its bytes; empty where they were not digested."""

    @classmethod
    def of(cls, path: str) -> Self | None:
        """Return the file at `path` as it is now, without a digest; None where there is no regular file."""
        try:
            status = os.stat(path)  # noqa: PTH116 - a Path for each of thousands of files is slow
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_at(self, path: str) -> bool:
        """Return whether the file at `path` is this one, unchanged as far as its size, times and inode tell."""
        return self._replace(sha256="") == ReadFile.of(path)


class ReadLog:
    """The files that Python opens for reading inside `with ReadLog() as log:`, in any thread of this process.

    `ctx.reads(log)` then makes a stage's result depend on them. Files that are written to as well are left out, and
    Python's modules. What opens files without Python is not heard: `torch.jit.load`, PyArrow, OpenCV, HDF5; so are
    other processes. `add` takes these.
    """

    def __init__(self) -> None:
        self._read: dict[str, ReadFile] = {}
        self._written: set[str] = set()

    def __enter__(self) -> Self:
        """Begin to listen."""
        _listen()
        _open_logs.append(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Listen no more."""
        _open_logs.remove(self)

    @property
    def files(self) -> Mapping[str, ReadFile]:
        """The files by absolute path, each as it was when it was first opened."""
        return {path: file for path, file in self._read.items() if path not in self._written}

    @property
    def is_current(self) -> bool:
        """Whether none of the files that are still there has changed since."""
        return all(file.is_at(path) or ReadFile.of(path) is None for path, file in self.files.items())

    def add(self, path: str | os.PathLike[str]) -> None:
        """Add the file at `path`, which is about to be read without Python's knowledge."""
        self._hear(os.path.abspath(path), is_read=True)  # noqa: PTH100 - as above

    def repeat(self) -> None:
        """Add the files to the logs that are open now: what was read once, and kept, is used again."""
        for log in _open_logs:
            for path, file in self.files.items():
                log._read.setdefault(path, file)

    def _hear(self, path: str, is_read: bool) -> None:
        if not is_read:
            self._written.add(path)
        elif path not in self._read and not path.endswith(_CODE) and (file := ReadFile.of(path)) is not None:
            self._read[path] = file


@cache
def _listen() -> None:
    sys.addaudithook(_hear)  # for good: Python can't remove one


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _open_logs:
        return
    path, _, flags = args
    if isinstance(path, int):  # a descriptor that is open already
        return
    try:
        absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - as above
    except (OSError, TypeError, ValueError):  # no path, or the working directory was deleted: opening it will fail
        return
    for log in _open_logs:
        log._hear(absolute, flags & os.O_ACCMODE == os.O_RDONLY)
