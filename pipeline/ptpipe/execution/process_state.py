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
from typing import Any, NoReturn

from ptpipe.errors import UsageError

_entered: list[tuple[int, int]] = []
"""The process and the thread of each `process_state_restored` that has not ended, outermost first."""


@contextlib.contextmanager
def process_state_restored() -> Iterator[None]:
    """Leave the calling process as it was: plugins and the libraries that they import may change any of this.

    Restores `sys.path`, the handler of SIGCHLD and all that `settings_restored` does. Imported modules stay. Inside,
    `os._exit` raises SystemExit: see `_exit_refused`. Raises UsageError where another thread of this process is in
    such a `with`: each would run with what the plugins of the other have set. It does not wait, as a stage may be
    waiting for this thread.
    """
    me = os.getpid(), threading.get_ident()  # the process: a fork inherits the list
    try:
        _entered.append(me)
        if next(one for one in _entered if one[0] == me[0]) != me:
            raise UsageError(
                "ptpipe is running in another thread, and a run changes its whole process: run one after the other, or "
                "each in a process of its own"
            )
        path = list(sys.path)
        try:
            with settings_restored(), _child_handler_restored(), _exit_refused():
                yield
        finally:
            sys.path[:] = path
    finally:
        with contextlib.suppress(ValueError):  # interrupted before it was added
            _entered.remove(me)


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore on exit what code inside the `with` may set for the whole process, and later code depends on.

    That is `os.environ`, the working directory, the locale, the recursion limit, filters of warnings (but those that
    spare a message or a module), signal handlers (but that of SIGCHLD; in the main thread, the only one that can set
    them), and whether the garbage collector is enabled.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_restore_environment, dict(os.environ))
        with contextlib.suppress(OSError):  # it has been removed
            stack.callback(_restore_folder, Path.cwd())
        stack.callback(_restore_locale, locale.setlocale(locale.LC_ALL))
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        stack.callback(_restore_filters, list(warnings.filters))
        # Torch sets its handler of SIGCHLD once, for all data loaders: later ones would wait for workers that died.
        numbers = signal.valid_signals() - {signal.SIGCHLD}
        stack.callback(_restore_handlers, {number: signal.getsignal(number) for number in numbers})
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        yield


@contextlib.contextmanager
def _child_handler_restored() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not handler:
            _restore_handlers({signal.SIGCHLD: handler})
            if torch_signals := sys.modules.get("torch.utils.data._utils.signal_handling"):
                torch_signals._SIGCHLD_handler_set = False  # type: ignore[attr-defined]  # for the caller's, later runs'


@contextlib.contextmanager
def _exit_refused() -> Iterator[None]:
    """Let `os._exit` raise SystemExit inside the `with`: no stage may end the run with an exit code of its own choice.

    A fork has to end that way, and a watchdog's thread can't end the process otherwise; but with 0 it can't mean to.
    """
    leave, process, thread, is_inside = os._exit, os.getpid(), threading.get_ident(), True

    def refuse(status: int) -> NoReturn:  # a module that is imported inside may keep it
        if os.getpid() != process or not is_inside:
            leave(status)
        if threading.get_ident() != thread:
            leave(status or 1)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit, is_inside = leave, False


def _restore_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it has been removed meanwhile
        os.chdir(folder)


def _restore_locale(language: str) -> None:
    if locale.setlocale(locale.LC_ALL) != language:
        locale.setlocale(locale.LC_ALL, language)


def _restore_filters(filters: list[Any]) -> None:
    # Others are added by modules when these are imported, once, for a message or a module.
    added = [each for each in warnings.filters if each[0] != "error" and each not in filters and (each[1] or each[3])]
    warnings.filters[:] = [*added, *filters]  # type: ignore[index]  # a list, whatever its type says


def _restore_handlers(handlers: dict[signal.Signals, signal._HANDLER]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
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
