"""The worker processes of a parallel stage, as a wrapper of torch's default process group.

Launchers start the processes; each finds RANK, WORLD_SIZE and so on in its environment.
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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ptpipe import Context, StageError
from ptpipe_torch.distributed.stores import interfaces_to_use, worker_store
from ptpipe_torch.errors import first_line

if TYPE_CHECKING:
    import torch

Comm: TypeAlias = Literal["auto", "gloo", "nccl"]

TIMEOUT_S = 300.0
_BARRIER_S = 5.0
"""Timeout of the barrier after a failure that finds out which ranks are missing."""

_NUM_INITS = Counter[str]()
"""How often this process has initialized a worker group, by stage."""


class WorkerGroupError(StageError):
    """A collective operation failed: another worker died, or did not answer in time."""


@dataclass(frozen=True)
class WorkerGroup:
    """The workers of a stage, seen from one of them. With a single worker every collective is the identity."""

    rank: int = 0
    size: int = 1
    timeout_s: float = TIMEOUT_S
    """Seconds that a collective waits for other workers."""
    exit_stack: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)
    """Callbacks for when the group is closed; `init_worker_group` runs them."""

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each of `values` over all ranks, in float64; bit-identical on every rank."""
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        total = torch.tensor(values, dtype=torch.float64, device=group_device())
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the `values` of each rank, by rank. All ranks must pass the same number of values."""
        if self.size == 1:
            return [list(values)]
        import torch

        result: list[list[float]] = self.all_gather_tensor(torch.tensor(values, dtype=torch.float64)).tolist()
        return result

    def all_gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all ranks along a new first axis. All must have the same shape and dtype, on the CPU."""
        if self.size == 1:
            return tensor[None]
        import torch
        import torch.distributed as dist

        device = group_device()
        table = [torch.empty_like(tensor, device=device) for _ in range(self.size)]
        dist.all_gather(table, tensor.contiguous().to(device))
        return torch.stack(table).cpu()

    def all_equal(self, digest: bytes) -> bool:
        """Return whether all ranks pass the same `digest`."""
        values = [float(byte) for byte in digest]
        return all(other == values for other in self.all_gather(values))

    def rank_slice(self, num: int) -> slice:
        """Return the slice of `num` items that belongs to this rank; each item belongs to exactly one rank."""
        return slice(self.rank, num, self.size)


SINGLE_WORKER = WorkerGroup()


@contextmanager
def init_worker_group(
    ctx: Context, comm: Comm = "auto", timeout_s: float = TIMEOUT_S, on_cuda: bool = True
) -> Iterator[WorkerGroup]:
    """Initialize the process group of a stage's workers, and destroy it on exit.

    `ctx`: the stage's context, which has rank and number of workers. `comm`: backend of the process group; auto: nccl
    where every worker has its own CUDA device, else gloo. `timeout_s`: how long a collective may wait. `on_cuda`:
    whether to use CUDA devices where available.

    Raises WorkerGroupError, naming the missing worker, where one fails; StageError where this process was not launched
    as one of `ctx.num_workers`.
    """
    if ctx.num_workers == 1:
        with ExitStack() as exit_stack:
            yield WorkerGroup(exit_stack=exit_stack)
        return
    import torch.distributed as dist

    _init_process_group(ctx, comm, timeout_s, on_cuda)
    # A separate group: after a failure in the middle of a collective the main one can't be used any more.
    watch = dist.new_group(backend="gloo", timeout=timedelta(seconds=_BARRIER_S))
    try:
        with ExitStack() as exit_stack:
            yield WorkerGroup(ctx.rank, ctx.num_workers, timeout_s, exit_stack)
            dist.barrier()  # no rank may leave while another still communicates with it
    except RuntimeError as error:
        if not is_comm_failure(error):
            raise
        raise WorkerGroupError(_who_is_missing(watch, ctx.rank, error, timeout_s)) from error
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _init_process_group(ctx: Context, comm: Comm, timeout_s: float, on_cuda: bool) -> None:
    import torch.distributed as dist

    os.environ.update(ranks_from_slurm(os.environ))
    if os.environ.get("WORLD_SIZE", "1") != str(ctx.num_workers):
        raise StageError(f"{ctx.kind} needs {ctx.num_workers} workers; this process was not launched as one of them")
    os.environ.update(interfaces_to_use(os.environ))
    on_cuda = on_cuda and _take_own_device()
    backend = choose_comm(comm, on_cuda)
    # A unique prefix each time: a process launched by a cluster runs several stages, and reruns one whose result was
    # altered, all through the same store. torchrun's store outlives restarted processes as well.
    uses_agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if uses_agents_store else "0"
    _NUM_INITS[ctx.stage_id] += 1
    name = f"{attempt}/{ctx.stage_id}/{_NUM_INITS[ctx.stage_id]}/"
    store = dist.PrefixStore(name, worker_store(ctx.rank, ctx.num_workers))  # type: ignore[attr-defined]  # public
    dist.init_process_group(
        backend, store=store, timeout=timedelta(seconds=timeout_s), rank=ctx.rank, world_size=ctx.num_workers
    )


def ranks_from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Derive torch's environment variables from SLURM's; empty where they are set or outside a SLURM step.

    Raises StageError where a variable of the step is missing.
    """
    if "RANK" in variables or "SLURM_STEP_ID" not in variables:
        return {}
    if missing := {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} - variables.keys():
        raise StageError(f"SLURM_STEP_ID is set without {', '.join(sorted(missing))}")
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
    """Select a CUDA device by LOCAL_RANK; return whether each process of this machine has its own."""
    import torch

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num:
        torch.cuda.set_device(_number("LOCAL_RANK", "0") % num)
    return 0 < _number("LOCAL_WORLD_SIZE", "1") <= num


def _number(variable: str, default: str) -> int:
    value = os.environ.get(variable, default)
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise StageError(f"the environment variable {variable} must be a number, not {value!r}")
    return int(value)


def choose_comm(comm: Comm, has_own_device: bool) -> str:
    """Return the backend of the process group. `has_own_device`: whether each process has its own CUDA device.

    Raises StageError for nccl where it hasn't.
    """
    import torch.distributed as dist

    if comm == "nccl" and not has_own_device:
        raise StageError("comm nccl needs a CUDA device for each worker of a machine; use fewer workers, or comm auto")
    if comm != "auto":
        return comm
    return "nccl" if has_own_device and dist.is_nccl_available() else "gloo"


def is_comm_failure(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process is missing."""
    import torch.distributed as dist

    words = ("connection", "peer", "timed out", "timeout", "socket", "broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _who_is_missing(watch: Any, rank: int, error: RuntimeError, timeout_s: float) -> str:
    """Run a barrier of the remaining ranks, and describe which are missing."""
    import torch.distributed as dist

    hangs = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    known = re.search(r"worker \d+(, \d+)*", str(error))  # errors of SharedMemory name it
    missing = known[0] if known else "another worker" if rank == 0 or not hangs else "worker 0"
    try:
        dist.monitored_barrier(watch, timeout=timedelta(seconds=_BARRIER_S), wait_all_ranks=True)
    except RuntimeError as failure:
        # Rank 0 waits for all and learns which ones failed; the others wait for rank 0 only.
        named = re.search(r"[Rr]anks? ([\d, ]+) failed to pass", str(failure))
        missing = f"worker {named[1].strip()}" if named and rank == 0 else missing
        if not hangs:
            return f"{missing} has gone"
        return (
            f"{missing} did not answer for {timeout_s:g} s: it hangs, or is far slower than the others "
            "(the stage's timeout_s, where it has one, allows for that)"
        )
    return f"worker {rank} could not continue: {first_line(error)}"


def group_device(group: Any = None) -> Any:
    """Return the device on which collectives of the process group `group` (None: the default one) expect tensors."""
    import torch
    import torch.distributed as dist

    on_cuda = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
