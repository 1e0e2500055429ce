"""Writing files so that nobody ever sees half of one, and everybody can read them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Mapping
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


def strict_json(value: object) -> str:
    """JSON that every program can read: NaN and the infinities, which JSON has not, become words."""
    try:
        return json.dumps(value, indent=1, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=1, default=str, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, safe from a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
