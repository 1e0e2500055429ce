"""What each of some workers does in a test of shared memory: `python -m shared_memory_work FOLDER TASK`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ptpipe import Context
from ptpipe_torch.distributed import worker_group
from ptpipe_torch.distributed.shared_memory import SharedMemory, share_memory
from ptpipe_torch.distributed.worker_group import WorkerGroup, WorkerGroupError, init_worker_group

SIZES = (1, 17, 1000, 65_536)
ROUNDS = 300
TIMEOUT_S, BARRIER_S, HANG_S = 1.5, 2.5, 5
"""Of the task `hangs`."""


def reduces(workers: WorkerGroup, memory: SharedMemory) -> object:
    """How often a result was not that of the process group, which is exact for whole numbers."""
    generator = torch.Generator().manual_seed(workers.rank)
    num_wrong = 0
    for round_ in range(ROUNDS):
        tensors = [torch.randint(-1000, 1000, (size,), generator=generator).float() for size in SIZES[: 1 + round_ % 4]]
        operation, torchs = (("sum", dist.ReduceOp.SUM), ("min", dist.ReduceOp.MIN))[round_ % 2]
        expected = [tensor.clone() for tensor in tensors]
        if round_ % 3 == 0:  # not in lockstep otherwise
            for tensor in expected:
                dist.all_reduce(tensor, torchs)
        if round_ % 50 == 0:
            time.sleep(0.03 * workers.rank)  # longer than one stays awake
        memory.reduce(tensors, operation)
        if round_ % 3 == 0:
            num_wrong += not all(map(torch.equal, tensors, expected))
    return num_wrong


def fractions(workers: WorkerGroup, memory: SharedMemory) -> object:
    """The bits of a sum that depends on its order, and whether all have them."""
    values = torch.rand(10_001, generator=torch.Generator().manual_seed(workers.rank)) * 10.0 ** (3 * workers.rank)
    memory.reduce([values], "sum")
    return workers.all_equal(values.numpy().tobytes()[:4096])


def dies(workers: WorkerGroup, memory: SharedMemory) -> object:
    """One worker exits; return how long the other waited, and its error."""
    memory.reduce([torch.zeros(1)], "sum")
    if workers.rank == 1:
        os._exit(0)
    begin_s = time.monotonic()
    try:
        memory.reduce([torch.zeros(1)], "sum")
    except RuntimeError as error:
        return [str(error), time.monotonic() - begin_s]
    return None


def fails(workers: WorkerGroup, memory: SharedMemory) -> object:
    """One ends the stage with an error of its own, and its process goes on."""
    if workers.rank == 1:
        raise ValueError("broken")
    memory.reduce([torch.zeros(1)], "sum")
    return None


def fits_exactly(workers: WorkerGroup, memory: SharedMemory) -> object:
    """The greatest that there is room for, and one more."""
    memory.reduce([torch.ones(sum(SIZES))], "sum")
    try:
        memory.reduce([torch.ones(sum(SIZES) + 1)], "sum")
    except AssertionError:
        return "refused"
    return None


def hangs(workers: WorkerGroup, memory: SharedMemory) -> object:
    """One comes too late: after the other has looked for it in vain."""
    if workers.rank == 1:
        time.sleep(HANG_S)
        return None
    memory.reduce([torch.zeros(1)], "sum")
    return None


def main(folder: Path, task: str) -> None:
    rank, num = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ctx = Context("one", "toy.work", 1, folder, rank=rank, num_workers=num)
    results: object
    if task == "hangs":
        worker_group._BARRIER_S = BARRIER_S
    try:
        with init_worker_group(ctx, "gloo", timeout_s=TIMEOUT_S if task == "hangs" else 60) as workers:
            memory = share_memory(workers, sum(SIZES))
            assert memory is not None
            results = globals()[task](workers, memory)
            if task == "dies":
                (folder / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")
                os._exit(0)
    except (WorkerGroupError, ValueError) as error:
        results = [type(error).__name__, str(error)]
    time.sleep(2 if task == "fails" and rank == 1 else 0)
    if task == "reduces":
        assert "memfd:ptpipe" not in Path("/proc/self/maps").read_text(), "something is left"
        assert not any(
            "memfd:ptpipe" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()
        )
    (folder / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
