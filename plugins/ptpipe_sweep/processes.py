"""Worker processes of this machine: a process a trial, some at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ptpipe import ExitCode, Terminated, one_line
from ptpipe.launching import python_command
from ptpipe_sweep.worker import Request

MAX_RETRIES = 2
"""How often a trial is run again whose process was killed, say by another user or for memory."""
_POLL_S = 0.05
_GRACE_S = 60.0
"""How long an interrupted process has to write its checkpoint and its record."""
_OF_JOBS = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")
"""A CI job's summary gets the sweep's table, where the user wants it, and no report of each trial."""
_KILLED = -signal.SIGKILL
NOT_BEGUN: dict[str, Any] = {"exit_code": int(ExitCode.INTERRUPTED), "message": "interrupted before it began"}


class TrialProcess:
    """The process that runs one trial."""

    def __init__(self, request: Request, threads: int) -> None:
        """Start it; its libraries may use that many threads."""
        self.request = request
        request.result.unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in _OF_JOBS}
        environment = kept | {"OMP_NUM_THREADS": str(threads)}
        with request.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # ptpipe itself
                python_command("ptpipe_sweep.worker"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C goes to the sweep alone, which passes it on once
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(asdict(request) | {"parent_pid": os.getpid()}).encode())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, however."""
        return self._process.poll() is not None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, so that nothing is known of the trial, but what it stored is there."""
        return self._process.poll() == _KILLED and not self.request.result.exists()

    def result(self) -> dict[str, Any]:
        """Return how the trial ended; the process must have ended."""
        try:
            found: dict[str, Any] = json.loads(self.request.result.read_bytes())
        except FileNotFoundError:
            if self._process.returncode in (0, -signal.SIGINT):  # of its own accord, or before it handled signals
                return NOT_BEGUN
            return {"exit_code": int(ExitCode.FAILED), "message": self._message()}
        self.request.result.unlink()
        return found

    def interrupt(self) -> None:
        """Send SIGINT, once: a second one would cut short what the first one began."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill it and what it started, unless it has ended: its id may be another's by then."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.has_ended

    def _message(self) -> str:
        if self._process.returncode < 0:
            return f"its process was killed by signal {-self._process.returncode}; see {self.request.log}"
        lines = self.request.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return one_line(next((line for line in reversed(lines) if line.strip()), "its process ended without a word"))


def stop(processes: Sequence[TrialProcess]) -> None:
    """Interrupt processes and wait for their end; kill them where this takes a minute, or at a second Ctrl-C."""
    try:
        for process in processes:
            process.interrupt()
        end_s = time.monotonic() + _GRACE_S
        for process in processes:
            process.wait(max(0.0, end_s - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_trial(request: Request, threads: int) -> dict[str, Any]:
    """Run one trial to its end, again where its process was killed; return how it ended.

    Where the file `request.stop_file` appears, the trial is interrupted, or does not begin.
    """
    if request.stop_file.exists():
        return NOT_BEGUN
    for _ in range(MAX_RETRIES + 1):
        process = TrialProcess(request, threads)
        try:
            while not process.has_ended and not request.stop_file.exists():
                time.sleep(_POLL_S)
        finally:
            stop([process])
        if not process.was_killed or request.stop_file.exists():
            break
    return process.result()


def run_trials(
    requests: Sequence[Request], num_workers: int, threads: int, ended: Callable[[Request, Mapping[str, Any]], None]
) -> None:
    """Run trials, `num_workers` at a time; `ended` is called with each one's end.

    After Ctrl-C, SIGTERM or SIGHUP, every process is interrupted and its end reported, and the exception propagates.
    """
    waiting = deque((request, MAX_RETRIES) for request in requests)
    running: dict[TrialProcess, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                request, retries = waiting.popleft()
                running[TrialProcess(request, threads)] = retries
            for process in [process for process in running if process.has_ended]:
                retries = running.pop(process)
                if process.was_killed and retries:
                    waiting.appendleft((process.request, retries - 1))
                else:
                    ended(process.request, process.result())
            time.sleep(_POLL_S)
    except (KeyboardInterrupt, Terminated):
        stop([*running])
        for process in running:
            ended(process.request, process.result())
        raise
