"""Processes forked from one that has imported torch, which would take each of them seconds.

Their strings have the hashes of that process (PYTHONHASHSEED), so the order of sets is the same in all of them: whether
another process comes to the same keys and bits is tested with real ones. Warnings that imports give are not theirs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Self

from .forked_servers import ServerFork


@contextmanager
def fork_server() -> Iterator[None]:
    """Start the process that others are forked from. It ends with the block."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([f"{__package__}.preloaded"])
    _forkserver.ensure_running()
    try:
        yield
    finally:
        _forkserver._stop()  # type: ignore[attr-defined]


class Fork:
    """A call in a forked process and a session of its own, with what tests use of `subprocess.Popen`.

    After a `with` it has ended, and its session with it if it ran until then.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        called = (function, arguments, self._files, dict(os.environ | (environment or {})), folder or Path.cwd())
        self._process = multiprocessing.get_context("forkserver").Process(target=_call, args=called)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has no session yet
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the number of the signal that killed it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end and return what it wrote to stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        out, err = (file.read_text(encoding="utf-8") if file.exists() else "" for file in self._files)
        self._folder.cleanup()
        return out, err


def end(process: Fork | subprocess.Popen[str]) -> None:
    """End a process that a failing test has left; the workers of a run end with it."""
    if isinstance(process, Fork):
        process.__exit__()
    elif process.poll() is None:
        process.kill()
        process.communicate()


def _call(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    files: list[Path],
    environment: Mapping[str, str],
    folder: Path,
) -> None:
    os.setsid()
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # the platform's, as in any other process
    os.environ.clear()
    os.environ.update(environment)
    _use_warning_options(environment.get("PYTHONWARNINGS", ""))
    import_module(
        "numpy"
    ).random.seed()  # as in any other process, not as in the next fork; Python's own generator does it itself
    tempfile.tempdir = None  # is looked up in this environment
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    function(*arguments)


def _use_warning_options(value: str) -> None:
    """Do as an interpreter with this PYTHONWARNINGS: libraries put their filters in front of it afterwards."""
    at_start = import_module(f"{__package__}.preloaded").FILTERS_AT_START
    of_libraries = [each for each in warnings.filters if each not in at_start]
    warnings.resetwarnings()
    warnings.filters += at_start  # type: ignore[operator]
    sys.warnoptions[:] = [option for option in value.split(",") if option]
    for option in sys.warnoptions:
        warnings._setoption(option)  # type: ignore[attr-defined]
    warnings.filters[:0] = of_libraries  # type: ignore[index]


def run_ptpipe(*arguments: str) -> None:
    """Be the command line."""
    from ptpipe.cli import main

    sys.argv = ["ptpipe", *arguments]
    main()


def _run_measuring(*arguments: str) -> None:
    """Be the command line, and fork what measures latencies, in NUM_ROUNDS = 8 rounds: see `forked_servers.py`."""
    from ptpipe_eval.latency import session

    session._server = ServerFork.forked().server  # type: ignore[assignment]
    run_ptpipe(*arguments)


def run_forked(
    folder: Path, *arguments: str | Path, timeout_s: float = 500, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of `ptpipe` in this folder, whose latencies forked processes measure."""
    with Fork(_run_measuring, *map(str, arguments), environment=environment, folder=folder) as process:
        out, err = process.communicate(timeout_s)
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
