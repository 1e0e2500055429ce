"""Collectives of torch.distributed between processes of this machine: checked for correct results, and timed.

`python -m ptpipe_elastic.collectives COMM TIMEOUT_S FILE NAME:SIZE_BYTES:NUM_TIMES...` is one of the processes, started
by torch elastic. Rank 0 writes the median seconds of each operation to FILE, as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ptpipe import StageError
from ptpipe_elastic.bootstrap import exit_now, write_error_file
from ptpipe_torch.distributed.stores import interfaces_to_use, worker_store
from ptpipe_torch.distributed.worker_group import is_comm_failure

_TIMEOUT_S = 60.0
_SENT_BYTES = 1 << 24
"""Sent in all to time one size of all-reduce, within these numbers of repetitions."""
_MIN_TIMES, _MAX_TIMES = 7, 51
_VALUE_BYTES = 4  # of float32


@dataclass(frozen=True)
class Collective:
    """One operation to time: `all_reduce`, `broadcast` or `barrier`."""

    name: str
    size_bytes: int
    """Of the float32 tensor."""
    num_times: int

    def __str__(self) -> str:
        return f"{self.name}:{self.size_bytes}:{self.num_times}"

    @classmethod
    def parse(cls, text: str) -> Collective:
        """Inverse of `str`."""
        name, size_bytes, num_times = text.split(":")
        return cls(name, int(size_bytes), int(num_times))


def run_collectives(collectives: Sequence[Collective], workers: int, comm: str, timeout_s: float) -> list[float]:
    """Run each collective between that many processes; return its median seconds on the slowest of them.

    `comm`: "gloo" or "nccl". `timeout_s`: for one operation; a process that hangs is ended after twice as long.
    Raises WorkersFailed if a process fails or receives wrong numbers.
    """
    from ptpipe_elastic.torch_elastic import run_workers

    with tempfile.TemporaryDirectory(prefix="ptpipe-collectives-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "seconds.json")
        arguments = [comm, str(timeout_s), str(file), *map(str, collectives)]
        run_workers("ptpipe_elastic.collectives", arguments, workers, Path(folder, "logs"))
        seconds: list[float] = json.loads(file.read_text(encoding="utf-8"))
    return seconds


def time_all_reduce(workers: int, sizes_bytes: Sequence[int]) -> list[float]:
    """Return the median seconds of a float32 all-reduce of each size between processes of this machine.

    Uses nccl if each worker can have a CUDA device, else gloo. The shared memory that ddp uses between the CPU workers
    of one machine is faster, but says nothing about several machines.
    Raises StageError if the processes can't communicate.
    """
    from ptpipe_elastic.torch_elastic import WorkersFailed

    comm = "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= workers else "gloo"
    times = {size: min(_MAX_TIMES, max(_MIN_TIMES, _SENT_BYTES // size)) for size in sizes_bytes}
    collectives = [Collective("all_reduce", size, num_times) for size, num_times in times.items()]
    try:
        return run_collectives(collectives, workers, comm, _TIMEOUT_S)
    except WorkersFailed as error:
        first = error.failures[0]
        reason = first.last_words or f"exit code {first.exit_code}"
        raise StageError(
            f"timing an all-reduce failed in worker {first.rank}: {reason}; `ptpipe doctor --workers {workers}` "
            "suggests fixes"
        ) from error


def main(comm: str, timeout_s: float, file: Path, collectives: Sequence[Collective]) -> NoReturn:
    """Take part in each collective, and exit with 0, or 1 if one failed."""
    faulthandler.dump_traceback_later(2 * timeout_s, exit=True)  # in case a collective hangs
    code = 0
    try:
        seconds = _time_all(comm, timeout_s, collectives)
        if int(os.environ["RANK"]) == 0:
            file.write_text(json.dumps(seconds), encoding="utf-8")
    except Exception as error:  # noqa: BLE001  # torch raises the errors of each of its layers
        message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        write_error_file(error, message, is_consequence=isinstance(error, RuntimeError) and is_comm_failure(error))
        code = 1
    exit_now(code)


def _time_all(comm: str, timeout_s: float, collectives: Sequence[Collective]) -> list[float]:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if comm == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    os.environ.update(interfaces_to_use(os.environ))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = worker_store(rank, world_size)
    dist.init_process_group(comm, store=store, rank=rank, world_size=world_size, timeout=timeout)
    medians_s = [_median_s(collective, device, timeout) for collective in collectives]
    slowest = torch.tensor(medians_s, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # a training step waits for the slowest worker
    dist.destroy_process_group()
    seconds: list[float] = slowest.tolist()
    return seconds


def _median_s(collective: Collective, device: torch.device, timeout: timedelta) -> float:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(max(1, collective.size_bytes // _VALUE_BYTES), dtype=torch.float32, device=device) % 1000
    operate: Callable[[torch.Tensor], object]
    match collective.name:
        case "all_reduce":
            given, expected = pattern * (rank + 1), pattern * (world_size * (world_size + 1) // 2)
            operate = dist.all_reduce
        case "broadcast":
            source = world_size - 1
            given, expected = pattern * (rank == source), pattern
            operate = partial(dist.broadcast, src=source)
        case _:
            given = expected = pattern
            operate = partial(_barrier, timeout=timeout)

    def run_checked() -> None:
        values = given.clone()
        operate(values)
        _check_equal(collective.name, values, expected)

    run_checked()  # also opens the connections, which must not be timed
    zeros = torch.zeros_like(pattern)  # however often they are added, nothing overflows
    times_s = []
    for _ in range(collective.num_times):
        _synchronize(device)
        start = time.perf_counter()
        operate(zeros)
        _synchronize(device)
        times_s.append(time.perf_counter() - start)
    _check_equal(collective.name, zeros, torch.zeros_like(zeros))
    run_checked()
    return statistics.median(times_s)


def _check_equal(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    # Whole numbers below 2**24 are exact in float32, in whatever order they are added.
    if not torch.equal(found, expected):
        error = float((found - expected).abs().max())
        raise ArithmeticError(f"{name} returned wrong numbers, off by up to {error:g}")


def _barrier(values: torch.Tensor, timeout: timedelta) -> None:
    if values.device.type == "cpu":
        dist.monitored_barrier(timeout=timeout)  # unlike `barrier`, names the rank that did not come
    else:
        dist.barrier()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), [Collective.parse(text) for text in sys.argv[4:]])
