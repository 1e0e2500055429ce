"""Why a stage failed, whatever its error does when it is asked."""

from __future__ import annotations

import pytest

from ptpipe import StageError
from ptpipe.execution.causes import cause, error_frames


class MuteError(StageError):
    def __str__(self):
        raise RuntimeError("no words")


def test_an_error_that_cannot_say_what_it_is_has_frames_and_a_line():
    with pytest.raises(MuteError) as raised:
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as error:
            raise MuteError from error
    assert error_frames((), (), raised.value) == ()
    assert cause(raised.value) == "<its __str__ raised RuntimeError>"
