"""How long an all-reduce takes among processes of this machine, by its size.

`python -m ptpipe_elastic.timing COMM FILE SIZE_BYTES...` is one of the processes, started by torch elastic; rank 0
writes the seconds, a number a size, to the file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ptpipe import StageError
from ptpipe_elastic.started import leave

_TIMEOUT_S = 60.0
"""Of one operation; all of them together have twice that."""
_SHARE_BYTES = 1 << 24
"""Sent in all for each size, within these numbers of times."""
_MIN_TIMES, _MAX_TIMES = 7, 51
_VALUE_BYTES = 4


def time_all_reduce(workers: int, sizes_bytes: Sequence[int]) -> list[float]:
    """Median seconds of an all-reduce of float32 of each size, on the slowest worker.

    Raises StageError where the workers can't do it.
    """
    from ptpipe_elastic.torch_elastic import WorkersFailed, run_workers

    comm = "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= workers else "gloo"
    with tempfile.TemporaryDirectory(prefix="ptpipe-timing-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "seconds.json")
        arguments = [comm, str(file), *map(str, sizes_bytes)]
        try:
            run_workers("ptpipe_elastic.timing", arguments, workers, Path(folder, "logs"))
        except WorkersFailed as error:
            first = error.failures[0]
            last = first.last_lines[-1].strip() if first.last_lines else f"exit code {first.exit_code}"
            raise StageError(
                f"timing an all-reduce failed in worker {first.rank}: {last}; `ptpipe doctor --workers {workers}` "
                "says what lacks"
            ) from error
        seconds: list[float] = json.loads(file.read_text(encoding="utf-8"))
        return seconds


def main(comm: str, file: Path, sizes_bytes: Sequence[int]) -> NoReturn:
    """Take part, and leave with exit code 0, or 1 where that failed."""
    faulthandler.dump_traceback_later(2 * _TIMEOUT_S, exit=True)  # whatever hangs
    code = 0
    try:
        seconds = _take_part(comm, sizes_bytes)
        if int(os.environ["RANK"]) == 0:
            file.write_text(json.dumps(seconds), encoding="utf-8")
    except Exception:  # noqa: BLE001  # torch raises what each layer of it met
        traceback.print_exc()
        code = 1
    leave(code)


def _take_part(comm: str, sizes_bytes: Sequence[int]) -> list[float]:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if comm == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(comm, timeout=timedelta(seconds=_TIMEOUT_S))
    medians = torch.tensor([_median_s(size, device) for size in sizes_bytes], dtype=torch.float64, device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)  # a training step waits for the slowest
    dist.destroy_process_group()
    seconds: list[float] = medians.tolist()
    return seconds


def _median_s(size_bytes: int, device: torch.device) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.full((max(1, size_bytes // _VALUE_BYTES),), float(rank + 1), device=device)
    dist.all_reduce(values)  # the first makes connections
    if not bool((values == size * (size + 1) / 2).all()):
        raise ArithmeticError("an all-reduce gave wrong numbers")
    values.zero_()
    times_s = []
    for _ in range(min(_MAX_TIMES, max(_MIN_TIMES, _SHARE_BYTES // size_bytes))):
        start = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
