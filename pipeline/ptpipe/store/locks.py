"""Kernel advisory locks (flock) on files: released when the holder exits, however it exits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ptpipe.errors import PtpipeError
from ptpipe.store.files import inherit_writers

_HINTS = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBADF),  # EBADF: over NFS, a file that is open for reading
        "everybody who uses an artifacts folder must be able to write to it (a common group, umask 002)",
    ),
    **dict.fromkeys(
        (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS),
        "the artifacts folder must be on a file system that supports file locks (flock)",
    ),
}


class LockedError(OSError):
    """Another process holds the lock."""


def exclusive_lock(path: Path, on_wait: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Hold a file exclusively inside the `with`; the file is created if missing and stays.

    `on_wait` is called once before waiting for another holder. Without it, raises LockedError instead of waiting.
    Raises PtpipeError where the file can't be opened or locked.
    """
    return _lock(path, fcntl.LOCK_EX, on_wait)


def shared_lock(path: Path, on_wait: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Hold a file together with other sharers inside the `with`; `path`, `on_wait`: as in `exclusive_lock`."""
    return _lock(path, fcntl.LOCK_SH, on_wait)


@contextlib.contextmanager
def _lock(path: Path, operation: int, on_wait: Callable[[], None] | None) -> Iterator[None]:
    with _explained(path):
        descriptor = _open(path)
    try:
        with _explained(path):
            is_locked = _try_lock(descriptor, operation)
        if not is_locked:
            if on_wait is None:
                raise LockedError(f"{path} is locked")
            on_wait()
            with _explained(path):
                fcntl.flock(descriptor, operation)
        yield
    finally:
        with contextlib.suppress(OSError):  # the lock is released, whatever the file system reports on closing
            os.close(descriptor)


def _open(path: Path) -> int:
    # For reading and writing: over NFS a shared lock needs the one, an exclusive lock the other.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if os.fstat(descriptor).st_uid == os.geteuid():
            inherit_writers(path)
        return descriptor
    except PermissionError:
        if not path.exists():
            raise
        # Another user's file: a local file system locks it all the same.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _try_lock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError into a PtpipeError that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if hint := _HINTS.get(error.errno or 0):
            reason = f"{reason}; {hint}"
        raise PtpipeError(f"cannot lock {path}: {reason}") from error
