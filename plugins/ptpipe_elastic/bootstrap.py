"""Entry point of every worker process.

    python -m ptpipe_elastic.bootstrap RUN_PID STORE_URL LOG_FOLDER MODULE ARGUMENT...

It ties the worker's life to that of its run, redirects its output to a file, leaves Ctrl-C to the run, and then runs
MODULE as `__main__`.
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
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ptpipe_torch.distributed.stores import STORE
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


def write_error_file(error: BaseException, message: str, frames: Sequence[str] = (), **flags: bool) -> None:
    """Write a worker's error to the file that torch elastic reads, and its traceback to the worker's log."""
    traceback.print_exception(error)
    content = {"message": message, "timestamp": int(time.time()), "frames": frames, **flags}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content), encoding="utf-8")


def _start(run_pid: int, store_url: str, folder: Path, module: str, arguments: list[str]) -> None:
    _exit_with_run(run_pid)
    for number in (signal.SIGINT, signal.SIGHUP):  # the run handles these, and ends its workers
        signal.signal(number, signal.SIG_IGN)
    log = os.open(log_file(folder, int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.environ[STORE] = f"{store_url}/{os.environ['TORCHELASTIC_RUN_ID']}"  # another one after each restart
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # made up: nothing listens there, and nothing should
        del os.environ[name]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exit_with_run(run_pid: int) -> None:
    """Never outlive the run: it may be killed, and restarted at once on the same scratch folder."""
    if sys.platform == "linux":  # at once; elsewhere within half a second
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != run_pid:  # it was killed before this process could ask for the signal
        os._exit(1)
    exit_with_parent(run_pid)


if __name__ == "__main__":
    _start(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
