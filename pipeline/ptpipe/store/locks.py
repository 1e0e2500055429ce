"""Kernel advisory locks (flock) on files: released when the holder exits, however it exits."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path


class LockedError(OSError):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a file exclusively inside the `with`; the file is created if missing and stays.

    `on_wait` is called once before waiting for another holder. Without it, raises LockedError instead of waiting.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if on_wait is None:
                raise LockedError(f"{path} is locked") from error
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def shared_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a file together with other sharers inside the `with`; as `exclusive_lock` otherwise."""
    with path.open("a+") as file:  # NFS grants a shared lock only on a file that is open for reading
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if on_wait is None:
                raise LockedError(f"{path} is locked") from error
            on_wait()
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
