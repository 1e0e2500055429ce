"""How every worker process starts: `python -m ptpipe_elastic.started LOG_FOLDER MODULE ARGUMENT...`.

It writes what it prints to a file of its own, never outlives the run, leaves Ctrl-C to the run, and then is MODULE.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

_PARENT_CHECK_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def log_file(folder: Path, rank: int) -> Path:
    """What a worker prints, of all its attempts."""
    return folder / f"rank-{rank}.log"


def leave(code: int) -> NoReturn:
    """End a worker at once: Python would take torch apart first, for a second, and nothing here waits for that."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(folder: Path, module: str, arguments: list[str]) -> None:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle, which then ends its workers
    log = os.open(log_file(folder, int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    """Never outlive the run: it may be killed, and started again at once on the same scratch folder."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _start(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
