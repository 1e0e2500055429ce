"""Why a stage failed, whatever its error does when it is asked."""

from __future__ import annotations

import errno
import os

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


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "x"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_whatever_the_type_of_the_error(error):
    assert cause(error) == f"the disk is full: {error}"


@pytest.mark.parametrize(
    "text",
    ["115008 requested and 3968 written", "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Protobuf serialization failed."],
)
def test_a_file_that_was_cut_short_is_named(text):
    """As by NumPy and ONNX Runtime, which drop the reason."""
    assert cause(OSError(text)) == f"a file could not be written to its end, as on a full disk: OSError: {text}"


def test_a_cause_that_a_plugin_put_into_words_stays():
    assert cause(StageError("cannot write x: No space left on device")) == "cannot write x: No space left on device"


def test_an_error_without_words_is_named_by_its_type():
    assert cause(StageError("")) == "StageError"
