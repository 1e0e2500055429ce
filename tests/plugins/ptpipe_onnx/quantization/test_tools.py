"""What ONNX Runtime's tools print, log and warn of goes to the run's log."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from ptpipe import Context, StageError
from ptpipe.events import Event, LogLine
from ptpipe_onnx.quantization.tools import quantizer_tools


def test_nothing_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = []
    with quantizer_tools(Context("a", "quant.onnx", 7, tmp_path, _tell=events.append), "no"):
        print("a line")
        logging.getLogger().warning("a record")
        for _ in range(2):
            warnings.warn("invalid value encountered in divide", RuntimeWarning, stacklevel=1)
    lines = [event.text for event in events if isinstance(event, LogLine)]
    assert lines == [f"onnxruntime: {text}" for text in ("a record", "a line", "invalid value encountered in divide")]
    assert capsys.readouterr() == ("", "")


def test_an_exception_says_what_failed(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"quant\.onnx: no luck: three"):  # noqa: SIM117  # the inner one raises
        with quantizer_tools(Context("a", "quant.onnx", 7, tmp_path), "no luck"):
            raise ValueError("three")
