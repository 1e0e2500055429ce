"""Entry point of every worker process: `python -m ptpipe_elastic.bootstrap LOG_FOLDER MODULE ARGUMENT...`.

It redirects the worker's output to a file, ties its life to the run's, leaves Ctrl-C to the run, and then runs MODULE
as `__main__`.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from ptpipe_torch.runtime import exit_with_parent

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def log_file(folder: Path, rank: int) -> Path:
    """The file that takes what a worker prints, in all of its attempts."""
    return folder / f"rank-{rank}.log"


def exit_now(code: int) -> NoReturn:
    """End a worker without Python's finalization, which would spend a second on tearing down torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_error_file(error: BaseException, message: str, **flags: bool) -> None:
    """Write a worker's error to the file that torch elastic reads, and its traceback to the worker's log."""
    traceback.print_exception(error)
    content = {"message": message, "timestamp": int(time.time()), **flags}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content), encoding="utf-8")


def _start(folder: Path, module: str, arguments: list[str]) -> None:
    _exit_with_run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C, and ends its workers
    log = os.open(log_file(folder, int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exit_with_run() -> None:
    """Never outlive the run: it may be killed, and restarted at once on the same scratch folder."""
    if sys.platform == "linux":  # at once; elsewhere within half a second
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    exit_with_parent()


if __name__ == "__main__":
    _start(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
