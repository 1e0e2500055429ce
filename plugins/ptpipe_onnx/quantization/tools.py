"""Call ONNX Runtime's quantization tools: without what they print, and with their exceptions in a user's words."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from ptpipe import Context, PtpipeError, StageError

_MAX_CHARS = 500
_ASSERTION = re.compile(r"^\S+:\d+: .*?: Assertion `.*?` failed: ")
"""What onnx's converter begins its errors with: a line of its own source."""


class _RunLog(logging.Handler):
    """Writes records to the run's log."""

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self._ctx = ctx

    def emit(self, record: logging.LogRecord) -> None:
        self._ctx.log(f"onnxruntime: {_one_line(record.getMessage())}")


@contextmanager
def quantizer_tools(ctx: Context, failed: str) -> Iterator[None]:
    """Let the tools work: what they print, log and warn of goes to the run's log, and logging stays as it was.

    `failed`: what to say where they raise anything, which becomes a StageError with their reason.
    """
    root, handler, printed = logging.getLogger(), _RunLog(ctx), io.StringIO()
    level = root.level
    root.addHandler(handler)  # also keeps `logging.basicConfig`, which they call when imported, from adding its own
    warned: list[warnings.WarningMessage] = []
    try:
        with redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            yield
    except PtpipeError:
        raise
    except Exception as error:  # they raise anything
        reason = _ASSERTION.sub("", _one_line(str(error))) or type(error).__name__
        raise StageError(f"{ctx.kind}: {failed}: {reason}") from error
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        lines = [*printed.getvalue().splitlines(), *(str(warning.message) for warning in warned)]
        for line in dict.fromkeys(lines):  # some are printed for each batch
            ctx.log(f"onnxruntime: {_one_line(line)}")


def _one_line(text: str) -> str:
    """Return what a file's names may be part of, without newlines and escapes."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:_MAX_CHARS]
