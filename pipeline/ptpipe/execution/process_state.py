"""Process-wide state: a run leaves it as it was, a stage what other stages compute from, one thread at a time."""

from __future__ import annotations

import contextlib
import gc
import locale
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from ptpipe.errors import UsageError

_entered: list[tuple[int, int]] = []
"""The process and the thread of each `process_state_restored` that has not ended, outermost first."""


@contextlib.contextmanager
def process_state_restored() -> Iterator[None]:
    """Leave the calling process as it was: plugins and the libraries that they import may change any of this.

    Restores `sys.path` and all that `settings_restored` does. Imported modules stay. Raises UsageError where another
    thread of this process is in such a `with`: each would run with what the plugins of the other have set. It does not
    wait, as a stage may be waiting for this thread.
    """
    me = os.getpid(), threading.get_ident()  # the process: a fork inherits the list
    _entered.append(me)
    try:
        if next(one for one in _entered if one[0] == me[0]) != me:
            raise UsageError(
                "ptpipe is running in another thread, and a run changes its whole process: run one after the other, or "
                "each in a process of its own"
            )
        path = list(sys.path)
        try:
            with settings_restored():
                yield
        finally:
            sys.path[:] = path
    finally:
        _entered.remove(me)


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore on exit what code inside the `with` may set for the whole process, and later code depends on.

    That is `os.environ`, the working directory, the locale, the recursion limit, filters that make errors of warnings,
    signal handlers (in the main thread, the only one that can set them), and whether the garbage collector is enabled.
    """
    environment, folder, filters = dict(os.environ), Path.cwd(), list(warnings.filters)
    language, depth = locale.setlocale(locale.LC_ALL), sys.getrecursionlimit()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    is_collecting = gc.isenabled()
    try:
        yield
    finally:
        _restore_environment(environment)
        os.chdir(folder)
        if locale.setlocale(locale.LC_ALL) != language:
            locale.setlocale(locale.LC_ALL, language)
        sys.setrecursionlimit(depth)
        # Others are added by modules when these are imported, once, and change what is shown alone.
        added = [each for each in warnings.filters if each[0] != "error" and each not in filters]
        warnings.filters[:] = [*added, *filters]  # type: ignore[index]  # a list, whatever its type says
        if threading.current_thread() is threading.main_thread():
            _restore_handlers(handlers)
        (gc.enable if is_collecting else gc.disable)()


def _restore_handlers(handlers: dict[signal.Signals, signal._HANDLER]) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:  # None: not set from Python
            if number == signal.SIGALRM:
                signal.alarm(0)  # it would end the process that does not expect it
            signal.signal(number, handler)


def _restore_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
