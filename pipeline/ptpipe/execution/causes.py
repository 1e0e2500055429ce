"""Why a stage failed, for the screen."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ptpipe.errors import PtpipeError, StageError
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.frames import own_frames
from ptpipe.plan.source_functions import functions_above
from ptpipe.plan.vocabulary import Plugin
from ptpipe.printable import error_text, first_line

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# What NumPy and ONNX Runtime say of a file that could not be written as a whole; both leave out the reason.
_CUT_SHORT = re.compile(r"\d+ requested and \d+ written|Protobuf serialization failed")


def frames(plan: Plan, stage: PlannedStage, error: BaseException) -> tuple[str, ...]:
    """Return the lines of the plugins' and the user's code that an error of a stage came through."""
    folders = {function.path.parent for function in functions_above(plan)[stage.id]}
    return error_frames(plan.vocabulary.plugins, folders, error)


def error_frames(plugins: Sequence[Plugin], folders: Collection[Path], error: BaseException) -> tuple[str, ...]:
    """Return the lines of the plugins' code that `error` came through; of a mistake, those of the user's functions.

    `plugins`: all that are loaded. `folders`: of the files of the user's functions.
    """
    if isinstance(error, StageError) and error.frames:
        return error.frames
    if not isinstance(error, PtpipeError):
        return own_frames(plugins, error, folders)
    return own_frames((), error.__cause__, folders, error_text(error)) if error.__cause__ else ()


def cause(error: BaseException) -> str:
    """Return the error in one line."""
    text = first_line(error)
    if isinstance(error, PtpipeError) and text:
        return text
    # Libraries that are not Python, such as safetensors, have errors of their own for it, with the same text.
    is_full = isinstance(error, OSError) and error.errno in _FULL_DISK
    is_memory = "shared memory" in text  # of data loading workers, which is no disk
    if is_full or (not is_memory and any(os.strerror(number) in text for number in _FULL_DISK)):
        return f"the disk is full: {text}"
    if _CUT_SHORT.search(text):
        return f"a file could not be written to its end, as on a full disk: {type(error).__name__}: {text}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
