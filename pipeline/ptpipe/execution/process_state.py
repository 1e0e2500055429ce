"""Process-wide state (garbage collector, import path, environment, signal handlers), restored after a run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def process_state_restored() -> Iterator[None]:
    """Leave the calling process as it was: plugins and the libraries that they import may change any of this.

    Restores `sys.path`, `os.environ`, the working directory, signal handlers (in the main thread, the only one that
    can set them), and whether the garbage collector is enabled. Imported modules stay.
    """
    path, environment, folder = list(sys.path), dict(os.environ), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    is_collecting = gc.isenabled()
    try:
        yield
    finally:
        sys.path[:] = path
        _restore_environment(environment)
        if Path.cwd() != folder:
            os.chdir(folder)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler and handler is not None:  # None: not set from Python
                    signal.signal(number, handler)
        (gc.enable if is_collecting else gc.disable)()


def _restore_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
