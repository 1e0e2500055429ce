"""Processes forked from one that has imported torch, which would take each of them seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.forkserver import _forkserver
from pathlib import Path

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
    """A call in a forked process and a session of its own, with what tests use of `subprocess.Popen`."""

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
    tempfile.tempdir = None  # is looked up in this environment
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    function(*arguments)


def run_ptpipe(*arguments: str) -> None:
    """Be the command line."""
    from ptpipe.cli import main

    sys.argv = ["ptpipe", *arguments]
    main()


def _run_measuring(*arguments: str) -> None:
    """Be the command line, and fork what measures latencies: see `forked_servers.py`."""
    from ptpipe_eval.latency import session

    session._server = ServerFork.forked().server  # type: ignore[assignment]
    run_ptpipe(*arguments)


def run_forked(
    folder: Path, *arguments: str | Path, timeout_s: float = 500, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of `ptpipe` in this folder, whose latencies forked processes measure."""
    process = Fork(_run_measuring, *map(str, arguments), environment=environment, folder=folder)
    try:
        out, err = process.communicate(timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
