"""Documents: JSON files that end with the SHA-256 of all that precedes it, so that a changed bit is noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ptpipe.errors import IntegrityError
from ptpipe.store.files import read_plain_file, write_atomically


def write_document(path: Path, text: str) -> None:
    """Replace the file by a document.

    `text`: JSON, an object with at least one member; its digest is added as the last one, `sha256`.
    """
    body = text.rstrip().removesuffix("}").rstrip().encode()
    write_atomically(path, body + _ending(body))


def read_document(path: Path) -> dict[str, Any]:
    """Return a document's members, without the digest.

    Raises IntegrityError where its bytes are not those written, or a link is in its place; OSError where they cannot be
    read (FileNotFoundError where there is no file).
    """
    content = read_plain_file(path)
    body, separator, _ = content.rpartition(_SEPARATOR)
    if not separator or content != body + _ending(body):
        raise IntegrityError(f"{path} was altered")
    try:
        members: dict[str, Any] = json.loads(body + b"}")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is no document: {error}") from error
    return members


_SEPARATOR = b',\n "sha256": "'


def _ending(body: bytes) -> bytes:
    return _SEPARATOR + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
