"""Fork the commands that tests run to their end from a process that has imported the core, which takes each 0.3 s.

Each is a process of its own, as `python -m ptpipe` would be after these imports. How real ones start, what they import
and how signals end them is tested with real ones.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType

READ_AT_START = ("PYTHON", "LANG", "LC_", "TZ", "LD_", "MALLOC_")
"""The beginnings of names of variables that the interpreter has read before a process is forked from it."""

ALSO_IMPORTED = ("encodings.utf_8_sig", "importlib.metadata", "pydantic.type_adapter", "ruamel.yaml")
"""What the core imports of others while it runs a manifest."""


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """What a forked process can't have of its own."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


class CommandFork:
    """A process that forks commands of Python until `end`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._read_at_start = read_at_start(environment)
        self._socket, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno())],
                env=environment,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as the commands' own: `sys.stdout` and `stderr` know that they can't seek
                stderr=subprocess.PIPE,
            )

    def can_run(self, environment: Mapping[str, str]) -> bool:
        """Return whether a forked process would be as one that is started in this environment."""
        return read_at_start(environment) == self._read_at_start

    def run(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run `[python, "-m" or "-c", ...]` to its end: its exit code, stdout and stderr."""
        request = {"command": command, "folder": str(folder), "environment": dict(environment)}
        control, there = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        with control, os.fdopen(out[0]), os.fdopen(err[0]):
            with suppress(ConnectionError), there, os.fdopen(out[1], "wb"), os.fdopen(err[1], "wb"):
                socket.send_fds(self._socket, [b"."], [there.fileno(), out[1], err[1]])
            with suppress(ConnectionError):  # that there is no answer tells it
                control.sendall(json.dumps(request).encode() + b"\n")
            answers, *written = read = (bytearray(), bytearray(), bytearray())
            try:
                _read_all(dict(zip((control.fileno(), out[0], err[0]), read, strict=True)), timeout_s)
            except BaseException:
                _kill(control, answers)
                raise
        if answers.count(b"\n") < 2:
            self._process.kill()
            raise RuntimeError(f"nothing is forked any more:\n{self._process.communicate()[1].decode()}")
        return int(answers.split()[1]), bytes(written[0]), bytes(written[1])

    def end(self) -> None:
        """Close the socket, which ends the process, and wait for that."""
        self._socket.shutdown(socket.SHUT_RDWR)  # also where a process that was forked from this one has it
        self._socket.close()
        self._process.communicate()


def _read_all(read: Mapping[int, bytearray], timeout_s: float) -> None:
    """Add to each what is written to its file, until nobody has these files open."""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for file in read:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
                chunk = b""
                with suppress(ConnectionResetError):  # by a process that ended before it received the request
                    chunk = os.read(key.fd, 1 << 16)
                if chunk:
                    read[key.fd].extend(chunk)
                else:
                    selector.unregister(key.fd)
            if selector.get_map() and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("ptpipe", timeout_s)


def _kill(control: socket.socket, answers: bytearray) -> None:
    """End a command, whose number and, where it has ended already, exit code are the answers; wait for its end."""
    while len(answers.split(b"\n")) < 2:
        if not (chunk := control.recv(100)):
            return
        answers.extend(chunk)
    if answers.count(b"\n") == 1:
        with suppress(ProcessLookupError):
            os.kill(int(answers), signal.SIGKILL)
    while control.recv(100):
        pass


def _import_core() -> None:
    """Import all of the core, and what a run imports of other distributions."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # commands would not show them again
        package = import_module("ptpipe")
        for module in walk_packages(package.__path__, "ptpipe."):
            if module.name not in {"ptpipe.__main__", "ptpipe.testing"}:
                import_module(module.name)
        for name in ALSO_IMPORTED:
            import_module(name)
    gc.freeze()


def _next_command(number: int) -> list[str]:
    """Fork a process for each request on this socket; return, in that process alone, the command that it is to be."""
    with socket.socket(fileno=number) as requests:
        while True:
            message, files, _, _ = socket.recv_fds(requests, 1, 3)
            if not message:
                sys.exit()
            if os.fork() == 0:
                os.close(requests.detach())
                return _command_of_child(*files)
            for file in files:
                os.close(file)


def _command_of_child(control: int, *outputs: int) -> list[str]:
    """Fork once more: the child returns its command, its parent tells of its beginning and its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for file in outputs:
            os.close(file)
        os.write(control, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):  # pytest has ended
            os.write(control, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    with os.fdopen(control) as file:
        request = json.loads(file.readline())
    for number, file in enumerate(outputs, start=1):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    return request["command"]


def _be(command: list[str]) -> None:
    """Do what the interpreter does with its arguments."""
    _, option, code, *arguments = sys.orig_argv = command
    sys.argv = [option, *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()) if option == "-m" else "")
    main = sys.modules["__main__"] = ModuleType("__main__")
    if option == "-m":
        runpy._run_module_as_main(code)  # type: ignore[attr-defined]
    else:
        exec(code, main.__dict__)


if __name__ == "__main__":
    _import_core()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of commands
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends this
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _be(_next_command(int(sys.argv[1])))
