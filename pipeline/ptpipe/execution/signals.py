"""Signal handling: SIGINT (Ctrl-C) and SIGTERM as exceptions, deferred over critical sections and imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ptpipe.errors import ExitCode, Terminated

_IMPORT_FRAMES = "<frozen importlib._bootstrap>"
_LONGEST_IMPORT_S = 20.0
"""How long a signal waits for an import that does not end."""
_RETRY_S = 0.02


class SignalHandlers:
    """Handlers that raise KeyboardInterrupt for SIGINT and Terminated for SIGTERM where that ends the program.

    Not inside an import: extension modules report another error in its place, or abort the process. And again where
    the exception was discarded, as those of a weak reference's callback or `__del__` are. For processes of our own: a
    library must leave its caller's handlers alone.
    """

    def __init__(self) -> None:
        self._first: tuple[signal.Signals, float] | None = None
        self._retry_at = 0.0

    def install(self) -> None:
        """Handle both signals from now on; one that the process was started to ignore (`nohup`) stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        report = sys.unraisablehook

        def repeat_or_report(unraisable: sys.UnraisableHookArgs) -> None:
            if isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
                is_interrupt = isinstance(unraisable.exc_value, KeyboardInterrupt)
                self._retry(signal.SIGINT if is_interrupt else signal.SIGTERM)
            else:
                report(unraisable)

        sys.unraisablehook = repeat_or_report

    @property
    def exit_code(self) -> ExitCode | None:
        """The exit code for the first signal received; None where there was none."""
        if self._first is None:
            return None
        return ExitCode.INTERRUPTED if self._first[0] == signal.SIGINT else ExitCode.TERMINATED

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first = self._first or (signal.Signals(number), now)
        if _is_importing(frame) and now - self._first[1] < _LONGEST_IMPORT_S:
            if now >= self._retry_at:  # otherwise one is under way: two Ctrl-C in one import are one
                self._retry(number)
        elif number == signal.SIGTERM:
            raise Terminated
        else:
            raise KeyboardInterrupt

    def _retry(self, number: int) -> None:
        """Send the signal again a little later: nothing tells when an import has ended."""
        self._retry_at = time.monotonic() + _RETRY_S
        timer = threading.Timer(_RETRY_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT_FRAMES:
        frame = frame.f_back
    return frame is not None


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
