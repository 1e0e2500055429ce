"""Signal handling: SIGINT (Ctrl-C) and SIGTERM as exceptions, deferred over critical sections."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from ptpipe.errors import Terminated


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise Terminated: the handler of SIGTERM, as KeyboardInterrupt is that of Ctrl-C."""
    raise Terminated


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the `with`; a second one takes effect at once."""
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
