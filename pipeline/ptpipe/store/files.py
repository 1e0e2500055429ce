"""Reading plain files, atomic file writes, fsync, strict JSON text."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from ptpipe.errors import IntegrityError

GONE = (FileNotFoundError, NotADirectoryError)
"""What a missing file raises; any other OSError says nothing about the file's content."""


def read_plain_file(path: Path) -> bytes:
    """Return a file's content. Raises IntegrityError where a link, a folder or a device is in its place."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise IntegrityError(f"{path} was altered: it is not a plain file")
    with errors_naming(path):
        return path.read_bytes()


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Let an OSError inside the `with` name the path, unless it names one: a failing write or fsync does not."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file's content by `content`: a reader, and a power cut, see all of the old or all of the new."""
    with atomic_path(path) as temporary, temporary.open("xb") as file:  # not tempfile: others may read our files
        file.write(content)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which replaces `path` durably when the `with` ends without error."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    try:
        with errors_naming(path):
            yield temporary
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    try:
        sync(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"written, but a power cut may still undo it: {reason}", str(path)) from error


def strict_json(value: object) -> str:
    """Return JSON that every parser reads: NaN and the infinities become strings, paths and other objects `str`."""
    # Not pydantic_core.to_json: it refuses lone surrogates, which is how Python carries undecodable file names.
    try:
        return json.dumps(value, indent=1, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value, default=str), parse_constant=str), indent=1)


def make_folder(path: Path) -> None:
    """Create a folder (and those above) unless it exists. A team's folder stays the team's, whatever the umask."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    inherit_writers(path)


def inherit_writers(path: Path) -> None:
    """Give everyone who may write to a path's folder write access to the path too."""
    writers = stat.S_IMODE(path.parent.stat().st_mode) & 0o022
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode | writers != mode:
        path.chmod(mode | writers)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with errors_naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
