"""Signal handling: SIGINT (Ctrl-C), SIGTERM and SIGHUP as exceptions, deferred over critical sections and imports."""

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
_EXIT_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HUNG_UP,
}
"""Of the signals that are handled."""


class SignalHandlers:
    """Handlers that raise KeyboardInterrupt for SIGINT, Terminated for SIGTERM and SIGHUP where that ends the program.

    Not inside an import: extension modules report another error in its place, or abort the process. And again where
    the exception was discarded, as those of a weak reference's callback or `__del__` are. For processes of our own: a
    library must leave its caller's handlers alone.
    """

    def __init__(self) -> None:
        self._first: tuple[signal.Signals, float] | None = None
        self._retry_at = 0.0

    def install(self) -> None:
        """Handle these signals from now on; one that the process was started to ignore (`nohup`) stays ignored."""
        for number in _EXIT_CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        report = sys.unraisablehook

        def repeat_or_report(unraisable: sys.UnraisableHookArgs) -> None:
            if isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
                self._retry(_signal_of(unraisable.exc_value))
            else:
                report(unraisable)

        sys.unraisablehook = repeat_or_report

    @property
    def exit_code(self) -> ExitCode | None:
        """The exit code for the first signal received; None where there was none."""
        if self._first is None:
            return None
        return _EXIT_CODES[self._first[0]]

    def ignore(self) -> None:
        """Ignore these signals from now on: the exit code is decided."""
        for number in _EXIT_CODES:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first = self._first or (signal.Signals(number), now)
        if _is_importing(frame) and now - self._first[1] < _LONGEST_IMPORT_S:
            if now >= self._retry_at:  # otherwise one is under way: two Ctrl-C in one import are one
                self._retry(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Terminated(_EXIT_CODES[signal.Signals(number)])

    def _retry(self, number: int) -> None:
        """Send the signal again a little later: nothing tells when an import has ended."""
        self._retry_at = time.monotonic() + _RETRY_S
        timer = threading.Timer(_RETRY_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def _signal_of(error: KeyboardInterrupt | Terminated) -> signal.Signals:
    code = error.exit_code if isinstance(error, Terminated) else ExitCode.INTERRUPTED
    return next(number for number, own in _EXIT_CODES.items() if own is code)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT_FRAMES:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP to the end of the `with`; a second one takes effect at once."""
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

    for number in _EXIT_CODES:
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
