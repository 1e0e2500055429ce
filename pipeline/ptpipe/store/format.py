"""The store's format number, in the file `format` of an artifacts folder."""

from __future__ import annotations

import re
from pathlib import Path

from ptpipe.errors import IntegrityError, PtpipeError, UsageError
from ptpipe.store.files import GONE, read_plain_file, write_atomically

FORMAT = 2
"""Of entries and run records: 2 are documents with a digest. Folders of format 1 have no number."""


def read_format(root: Path) -> int:
    """Return the number of an artifacts folder, 1 where it has none.

    Raises UsageError where it is newer than this version of ptpipe, IntegrityError where the file has no number,
    PtpipeError where it cannot be read.
    """
    path = root / "format"
    try:
        content = read_plain_file(path)
    except GONE:
        return 1
    except OSError as error:
        raise PtpipeError(f"cannot read the artifacts folder {root}: {error.strerror or error}") from error
    if not re.fullmatch(rb"[0-9]{1,9}\n", content):
        raise IntegrityError(f"{path} was altered: it has no number; delete it if no newer ptpipe uses this folder")
    if int(content) > FORMAT:
        raise UsageError(
            f"{root} was written by a newer ptpipe: its format is {int(content)}, and this version reads {FORMAT}; "
            "update ptpipe or use another artifacts folder"
        )
    return int(content)


def write_format(root: Path) -> None:
    """Write this version's number."""
    write_atomically(root / "format", f"{FORMAT}\n".encode())
