"""Why a stage failed, for the screen."""

from __future__ import annotations

import errno

from ptpipe.errors import PtpipeError
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.source_functions import functions_above
from ptpipe.plan.vocabulary import own_frames
from ptpipe.printable import first_line

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def frames(plan: Plan, stage: PlannedStage, error: BaseException) -> tuple[str, ...]:
    """Return the lines of the plugins' code that an error came through; of a mistake, those of the user's functions."""
    folders = {function.path.parent for function in functions_above(plan)[stage.id]}
    if not isinstance(error, PtpipeError):
        return own_frames(plan.vocabulary.plugins, error, folders)
    return own_frames((), error.__cause__, folders, str(error)) if error.__cause__ else ()


def cause(error: BaseException) -> str:
    """Return the error in one line."""
    text = first_line(error)
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        return f"the disk is full: {text}"
    if isinstance(error, PtpipeError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
