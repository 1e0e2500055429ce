"""One process of `ptpipe doctor --workers N`, started by torch elastic: meets the others, and works with them.

`python -m ptpipe_elastic.check COMM TIMEOUT_S FILE`; rank 0 writes the times of each operation, in ms, to the file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ptpipe_elastic.started import leave
from ptpipe_torch.distributed.worker_group import is_comm_failure

_NUM_VALUES = 1 << 18  # of float32: 1 MiB
_NUM_TIMES = 5


def main(comm: str, timeout_s: float, file: Path) -> NoReturn:
    """Work together once and leave with exit code 0, or 1 where that failed."""
    faulthandler.dump_traceback_later(2 * timeout_s, exit=True)  # whatever hangs
    code = 0
    try:
        times_ms = _work_together(comm, timeout_s)
        if int(os.environ["RANK"]) == 0:
            file.write_text(json.dumps(times_ms), encoding="utf-8")
    except Exception as error:  # noqa: BLE001  # torch raises what each layer of it met
        _write_error(error)
        code = 1
    leave(code)


def _work_together(comm: str, timeout_s: float) -> dict[str, float]:
    """Median times in ms of an all-reduce and a broadcast of 1 MiB and of a barrier. Wrong numbers raise."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if comm == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(comm, timeout=timedelta(seconds=timeout_s))
    rank, size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(_NUM_VALUES, dtype=torch.float32, device=device) % 1000

    def all_reduce() -> float:
        values = pattern * (rank + 1)
        ms = _elapsed_ms(lambda: dist.all_reduce(values), device)
        _check("all-reduce", values, pattern * (size * (size + 1) // 2))  # whole numbers below 2**24: exact
        return ms

    def broadcast() -> float:
        values = pattern.clone() if rank == size - 1 else torch.zeros_like(pattern)
        ms = _elapsed_ms(lambda: dist.broadcast(values, src=size - 1), device)
        _check("broadcast", values, pattern)
        return ms

    def barrier() -> float:
        if comm == "gloo":
            return _elapsed_ms(lambda: dist.monitored_barrier(timeout=timedelta(seconds=timeout_s)), device)
        return _elapsed_ms(dist.barrier, device)

    times_ms = {operation.__name__: _median(operation) for operation in (all_reduce, broadcast, barrier)}
    dist.destroy_process_group()
    return times_ms


def _check(name: str, found: torch.Tensor, right: torch.Tensor) -> None:
    if not torch.equal(found, right):
        raise ArithmeticError(f"{name} gave wrong numbers, off by up to {float((found - right).abs().max()):g}")


def _elapsed_ms(collective: Callable[[], object], device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    collective()
    _finish(device)
    return 1000 * (time.perf_counter() - start)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median(operation: Callable[[], float]) -> float:
    operation()  # the first one makes connections
    return statistics.median(operation() for _ in range(_NUM_TIMES))


def _write_error(error: Exception) -> None:
    """Leave the error where torch elastic looks for it, and the traceback in this process's log."""
    traceback.print_exception(error)
    content = {
        "message": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
        "timestamp": int(time.time()),
        "is_consequence": isinstance(error, RuntimeError) and is_comm_failure(error),
    }
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
