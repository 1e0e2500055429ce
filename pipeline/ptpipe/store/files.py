"""Atomic file writes, fsync, strict JSON text."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file's content: a reader, and a power cut, see all of the old or all of the new."""
    with atomic_path(path) as temporary, temporary.open("xb") as file:  # not tempfile: others may read our files
        file.write(content)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which replaces `path` durably when the `with` ends without error."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def strict_json(value: object) -> str:
    """Return JSON that every parser reads: NaN and the infinities become strings, paths and other objects `str`."""
    # Not pydantic_core.to_json: it refuses lone surrogates, which is how Python carries undecodable file names.
    try:
        return json.dumps(value, indent=1, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value, default=str), parse_constant=str), indent=1)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
