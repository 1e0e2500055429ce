"""Run commands in forks of one process that has imported everything: some milliseconds each, thousands in a minute.

Reads a JSON object a line from stdin, and answers with one on stdout. Started by `workplace.Commands`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from typing import Any

import ptpipe.plan.vocabulary
from ptpipe import cli

MODES = ("count", "fail", "kill before", "kill after")


class Calls:
    """The preloaded library of failing calls; without it, nothing is disturbed."""

    def __init__(self) -> None:
        preloaded = os.environ.get("LD_PRELOAD")
        self._library = ctypes.CDLL(preloaded) if preloaded else None
        if self._library:
            self._library.trace.restype = ctypes.c_char_p
            self._library.num_disturbed.restype = ctypes.c_long

    def disturb(self, fault: dict[str, Any]) -> None:
        """Set the fault of this process and its children; an empty one switches everything off."""
        if self._library:
            for_good = " " + " ".join(fault.get("for_good", ())) + " "
            mode = MODES.index(fault.get("mode", "count"))
            number = ctypes.c_long(fault.get("number", -1))
            folder = fault.get("folder", "").encode()
            self._library.set_fault(folder, number, mode, fault.get("error", 0), for_good.encode())

    def observed(self) -> dict[str, Any]:
        """What the last child called below the folder, and how many calls were disturbed."""
        if not self._library:
            return {"trace": "", "num_disturbed": 0}
        return {"trace": self._library.trace().decode(), "num_disturbed": self._library.num_disturbed()}


def warm_up(manifest: str) -> None:
    """Import what the commands import, by calling each."""
    with tempfile.TemporaryDirectory() as artifacts, contextlib.redirect_stdout(io.StringIO()):
        for arguments in (["run", manifest, "-q"], ["show", "last"], ["runs"], ["plan", manifest], ["gc"]):
            cli.cli.main([*arguments, "--artifacts", artifacts, "--json"], "ptpipe", standalone_mode=False)
        cli.cli.main(
            ["get", "last", "export", f"{artifacts}/got", "--artifacts", artifacts], "ptpipe", standalone_mode=False
        )


def run_forked(request: dict[str, Any], calls: Calls) -> dict[str, Any]:
    """Run one command and return how it ended."""
    out, err = (os.memfd_create(name) for name in ("out", "err"))
    child = os.fork()
    if child == 0:
        _become_command(request, calls, (out, err))
    descriptor = os.pidfd_open(child)
    in_time = bool(select.select([descriptor], [], [], request["timeout_s"])[0])
    os.close(descriptor)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = {"out": _content(out), "err": _content(err)}
    return {"code": code if in_time else None, **texts, **calls.observed()}


def _content(file: int) -> str:
    """Return all that was written to a descriptor, and close it."""
    with os.fdopen(file, "rb") as stream:
        stream.seek(0)
        return stream.read().decode(errors="replace")


def _become_command(request: dict[str, Any], calls: Calls, files: tuple[int, int]) -> None:
    try:
        os.environ.update(request["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
        sys.argv = ["ptpipe", *request["arguments"]]
        calls.disturb(request["fault"])
        cli.main()  # exits itself
    except BaseException:  # noqa: BLE001  # whatever it was, this must not go on as a second server
        traceback.print_exc()
        os._exit(99)


def serve(manifest: str) -> None:
    """Answer requests until stdin ends. stdout is for answers only: what the warm-up writes goes to stderr."""
    ptpipe.plan.vocabulary.BUILT_IN = ("ptpipe_report",)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm_up(manifest)
    calls = Calls()
    for line in sys.stdin:
        print(json.dumps(run_forked(json.loads(line), calls)), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
