"""Ctrl-C and SIGTERM end a run in good order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from ptpipe.errors import Terminated


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM as Python handles Ctrl-C: with an exception."""
    raise Terminated


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the end of the block. Who insists, by a second one, is heard at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    before: dict[int, Any] = {}
    held: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            held.clear()
            restore()
            signal.raise_signal(number)
        else:
            held.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler not in (signal.SIG_IGN, None):
            before[number] = handler
            signal.signal(number, hold)
    try:
        yield
    finally:
        restore()
        if held:
            signal.raise_signal(held[0])
