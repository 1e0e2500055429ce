"""The processes that do a stage together: torch's process group, in the words that stages need.

Who starts the processes is another matter: each finds RANK, WORLD_SIZE, MASTER_ADDR ... in its environment.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ptpipe import Context, StageError

if TYPE_CHECKING:
    import torch

Comm: TypeAlias = Literal["auto", "gloo", "nccl"]

TIMEOUT_S = 300.0
_BARRIER_S = 5.0
"""How long those that are left wait for each other to find out who is missing."""


_TEAMS = Counter[str]()
"""How often this process has met others, by stage."""


class WorkerGroupError(StageError):
    """Working together failed: another process died, or didn't come in time."""


@dataclass(frozen=True)
class WorkerGroup:
    """The workers of a stage, seen from one of them. Alone, every operation is the identity."""

    rank: int = 0
    size: int = 1
    timeout_s: float = TIMEOUT_S
    """How long an operation waits for another worker."""
    exit_stack: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)
    """What is to be done when the work together ends; `init_worker_group` does it."""

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64; the same bits on every rank."""
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        total = torch.tensor(values, dtype=torch.float64, device=group_device())
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """What each rank gave, by rank; all give the same number of values."""
        if self.size == 1:
            return [list(values)]
        import torch

        result: list[list[float]] = self.all_gather_tensor(torch.tensor(values, dtype=torch.float64)).tolist()
        return result

    def all_gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """What each rank gave, by rank, along a new first axis; all give the same shape and dtype, on the CPU."""
        if self.size == 1:
            return tensor[None]
        import torch
        import torch.distributed as dist

        device = group_device()
        table = [torch.empty_like(tensor, device=device) for _ in range(self.size)]
        dist.all_gather(table, tensor.contiguous().to(device))
        return torch.stack(table).cpu()

    def all_equal(self, digest: bytes) -> bool:
        """Whether all ranks have the same digest of something."""
        parts = [float(byte) for byte in digest]
        return all(other == parts for other in self.all_gather(parts))

    def rank_slice(self, num: int) -> slice:
        """Cut out one rank's part of that many things: every one belongs to exactly one rank."""
        return slice(self.rank, num, self.size)


SINGLE_WORKER = WorkerGroup()


@contextmanager
def init_worker_group(
    ctx: Context, comm: Comm = "auto", timeout_s: float = TIMEOUT_S, on_cuda: bool = True
) -> Iterator[WorkerGroup]:
    """Meet the other workers of a stage and work with them inside the `with`.

    `comm`: the process group's kind; auto: nccl where every worker has a CUDA device, else gloo. `timeout_s`: how long
    a collective operation may wait. `on_cuda`: whether CUDA devices are to be used where they are.

    Raises WorkerGroupError, which names the missing worker, where one fails; StageError where this process wasn't
    started as one of several.
    """
    if ctx.num_workers == 1:
        with ExitStack() as exit_stack:
            yield WorkerGroup(exit_stack=exit_stack)
        return
    import torch.distributed as dist

    os.environ.update(ranks_from_slurm(os.environ))
    if int(os.environ.get("WORLD_SIZE", "1")) != ctx.num_workers:
        raise StageError(f"{ctx.kind} wants {ctx.num_workers} workers, and this process is not one of so many")
    on_cuda = on_cuda and _take_own_device()
    backend = choose_comm(comm, on_cuda)
    # Each time under a name of its own: a process that a cluster started does several stages, and one again where its
    # result was altered, through one store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _uses_agents_store() else "0"
    _TEAMS[ctx.stage_id] += 1
    name = f"{attempt}/{ctx.stage_id}/{_TEAMS[ctx.stage_id]}/"
    store = dist.PrefixStore(name, _meeting_store(ctx.rank, ctx.num_workers))
    dist.init_process_group(
        backend, store=store, timeout=timedelta(seconds=timeout_s), rank=ctx.rank, world_size=ctx.num_workers
    )
    # Groups of their own: after a failure in the middle of an operation the main one is of no use.
    watch = dist.new_group(backend="gloo", timeout=timedelta(seconds=_BARRIER_S))
    try:
        with ExitStack() as exit_stack:
            yield WorkerGroup(ctx.rank, ctx.num_workers, timeout_s, exit_stack)
            dist.barrier()  # nobody leaves while another still talks to it
    except RuntimeError as error:
        if not is_comm_failure(error):
            raise
        raise WorkerGroupError(_who_is_missing(watch, ctx.rank, error, timeout_s)) from error
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _uses_agents_store() -> bool:
    """Whether the store outlives this process, so that another may find there what was meant for this one."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def _meeting_store(rank: int, world_size: int) -> Any:
    """Where processes leave word for each other: it listens on MASTER_PORT for as long as the process lives."""
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", rank, world_size))[0]


def ranks_from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """What torch wants to find in the environment, from what SLURM says; nothing where it is there or SLURM isn't."""
    if "RANK" in variables or "SLURM_STEP_ID" not in variables:
        return {}
    step = f"{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"  # several steps of a job may run at once
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", variables.get("SLURM_STEP_NODELIST", ""))
    found = {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_NTASKS"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.split(r"\D", variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0] or "1",
        "MASTER_ADDR": "".join(part or "" for part in first.groups()) if first else "localhost",
        "MASTER_PORT": str(15_000 + zlib.crc32(step.encode()) % 15_000),
    }
    return {name: value for name, value in found.items() if name not in variables}


def _take_own_device() -> bool:
    """Of several CUDA devices, let each process of a machine take its own; whether there are enough."""
    import torch

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % num)
    return 0 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= num


def choose_comm(comm: Comm, has_own_device: bool) -> str:
    """What `auto` comes to. `has_own_device`: whether each process has a CUDA device to itself."""
    import torch.distributed as dist

    if comm != "auto":
        return comm
    return "nccl" if has_own_device and dist.is_nccl_available() else "gloo"


def is_comm_failure(error: RuntimeError) -> bool:
    """Whether an operation failed for want of another process."""
    import torch.distributed as dist

    words = ("connection", "peer", "timed out", "timeout", "socket", "broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _who_is_missing(watch: Any, rank: int, error: RuntimeError, timeout_s: float) -> str:
    """Let those that are left meet once more, and name who doesn't come."""
    import torch.distributed as dist

    hangs = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    known = re.search(r"worker \d+(, \d+)*", str(error))  # shared memory tells
    missing = known[0] if known else "another worker" if rank == 0 or not hangs else "worker 0"
    try:
        dist.monitored_barrier(watch, timeout=timedelta(seconds=_BARRIER_S), wait_all_ranks=True)
    except RuntimeError as failure:
        # Rank 0 waits for all and tells who failed; the others wait for rank 0.
        named = re.search(r"[Rr]anks? ([\d, ]+) failed to pass", str(failure))
        missing = f"worker {named[1].strip()}" if named and rank == 0 else missing
        if not hangs:
            return f"{missing} has gone"
        return (
            f"{missing} did not answer for {timeout_s:g} s: it hangs, or is far slower than the others "
            "(the stage's timeout_s, where it has one, allows for that)"
        )
    return f"worker {rank} could not go on: {str(error).splitlines()[0]}"


def group_device(group: Any = None) -> Any:
    """Where tensors for that process group (the default one) must be."""
    import torch
    import torch.distributed as dist

    on_cuda = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
