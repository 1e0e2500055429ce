"""Fork the processes that measure latency from one that has imported torch, which would take each of them seconds.

What a forked one does is the same: it reads a request, forks its workers, and ends with its standard input. How real
ones start and end is tested in `latency/test_session.py` and in `end_to_end/test_smoke.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

LIBRARIES = ("onnxruntime", "torch")
"""That the models of these tests need: what else tests of this process have imported would be imported once more."""
NUM_ROUNDS = 8
"""Of a start, where real ones have 16: how narrow the intervals are is not tested here."""


@dataclass
class ForkedServer:
    """What a session needs of a `Popen`."""

    pid: int
    stdin: IO[str]
    stdout: IO[str]

    def communicate(self) -> None:
        """Wait for its end."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.read()
        self.stdout.close()


class ServerFork:
    """A process that forks servers until `end`, or the end of this process."""

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self._socket, self._pid = requests, pid

    @classmethod
    def started(cls) -> ServerFork:
        """Start it as a program, which imports what servers need."""
        here, there = socket.socketpair()
        with there:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            descriptors = [(os.POSIX_SPAWN_DUP2, there.fileno(), 0)]
            pid = os.posix_spawn(sys.executable, [sys.executable, __file__], environment, file_actions=descriptors)
        return cls(here, pid)

    @classmethod
    def forked(cls) -> ServerFork:
        """Fork it from this process, which has imported what servers need, and has no threads yet."""
        here, there = socket.socketpair()
        with there:
            if (pid := os.fork()) == 0:
                here.close()
                try:
                    fork_servers(there)
                finally:
                    os._exit(0)
        return cls(here, pid)

    @contextmanager
    def server(self) -> Iterator[tuple[ForkedServer, IO[bytes]]]:
        """Fork a server; on exit it has ended. Stands for `session._server`."""
        requests, results = os.pipe(), os.pipe()
        with TemporaryFile() as errors:
            path = os.pathsep.join(sys.path)
            socket.send_fds(self._socket, [path.encode()], [requests[0], results[1], errors.fileno()])
            os.close(requests[0])
            os.close(results[1])
            pid = int(self._socket.recv(100))
            server = ForkedServer(pid, os.fdopen(requests[1], "w"), os.fdopen(results[0], encoding="utf-8"))
            try:
                yield server, errors
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                server.communicate()

    def end(self) -> None:
        """Close the socket, which ends the process, and wait for that."""
        self._socket.close()
        os.waitpid(self._pid, 0)


def main() -> None:
    """Import what servers need, and fork them."""
    import onnxruntime  # noqa: F401  # before torch, as in a session
    import scipy.special  # noqa: F401  # for the intervals
    import torch  # noqa: F401

    from ptpipe.launching import load_vocabulary

    load_vocabulary([])
    fork_servers(socket.socket(fileno=os.dup(0)))


def fork_servers(requests: socket.socket) -> None:
    """Fork a server for each path that is sent with three files: its standard input, output and errors."""
    from ptpipe_eval.latency import server

    server._MAX_ROUNDS = NUM_ROUNDS
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for servers
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            sys.path[:] = message.decode().split(os.pathsep)
            _serve(server.main, requests, files)
        with suppress(PermissionError, ProcessLookupError):  # the child does it too, whichever is first
            os.setpgid(pid, pid)
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def _serve(serve: Any, requests: socket.socket, files: list[int]) -> None:
    code = 1
    try:
        requests.close()
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it waits for its workers
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        serve()
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
