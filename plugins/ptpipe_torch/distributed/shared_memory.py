"""Numbers brought together over the workers of one machine, through memory that all of them map.

A process group's messages pass through the system's network, and who waits for one sleeps until it is woken: both
cost processor time that training on CPUs has no other use for than training. Here a worker writes into its slot, counts
up, waits until all have counted, and reads all slots.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from ptpipe.host import usable_cpus
from ptpipe_torch.distributed.worker_group import WorkerGroup

Operation: TypeAlias = Literal["sum", "min"]

_OPERATIONS: dict[Operation, Callable[..., torch.Tensor]] = {"sum": torch.add, "min": torch.minimum}
_MOST_WORKERS = 8
"""Each reads what all have written: with many workers, messages in a ring move less."""
_LINE_BYTES = 64
"""Of a processor's cache: what different workers write must not share one."""
_NAME = "ptpipe"
_TOKEN_BYTES = 16
_AWAKE_S = 0.02
"""How long a worker keeps looking before it takes naps."""
_NAP_S = 0.0005
_LOOK_FOR_DEAD_S = 0.25


class SharedMemory:
    """A slot of float32 values for each worker of a workers. All workers do the same operations in the same order."""

    def __init__(self, workers: WorkerGroup, descriptor: int, num_values: int) -> None:
        """Map a file that `share_memory` made. Whoever has it open, and does not close it, counts as alive."""
        self._workers, self._descriptor, self._count = workers, descriptor, 0
        # Who waits awake takes the processor from others, where there is not one for each.
        self._awake_s = _AWAKE_S if workers.size * torch.get_num_threads() <= usable_cpus() else 0.0
        self._memory = mmap.mmap(descriptor, _size_bytes(workers, num_values))
        counts_end = _LINE_BYTES * (1 + workers.size)
        self._counts = memoryview(self._memory)[_LINE_BYTES:counts_end].cast("q")[:: _LINE_BYTES // 8]
        slots = torch.frombuffer(self._memory, dtype=torch.float32, offset=counts_end)
        self._slots = slots.view(workers.size, -1)[:, :num_values]
        # The system lets go of it when the file is closed or this process ends, however it does.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, workers.rank)

    def close(self) -> None:
        """Let go of it. Whoever may still hold this object holds nothing then."""
        self._counts.release()
        del self._counts, self._slots
        with suppress(BufferError):  # an error's traceback may still look at it
            self._memory.close()
        os.close(self._descriptor)

    def reduce(self, tensors: Sequence[torch.Tensor], operation: Operation) -> None:
        """Replace each tensor (float32, contiguous, on the CPU) by its sum or least value over all workers.

        The same bits on every worker: workers are taken in order. Raises RuntimeError, as a process group does, where
        another worker has ended or does not come within the team's time.
        """
        combine = _OPERATIONS[operation]
        assert sum(tensor.numel() for tensor in tensors) <= self._slots.shape[1], "more than a slot holds"
        self._wait()  # until all have read what was there before
        own = self._slots[self._workers.rank]
        for tensor, part in _parts(tensors):
            own[part].copy_(tensor.view(-1))
        self._step()
        self._wait()
        for tensor, part in _parts(tensors):
            values, (first, second, *others) = tensor.view(-1), [slot[part] for slot in self._slots]
            combine(first, second, out=values)
            for other in others:
                combine(values, other, out=values)
        self._step()

    def _step(self) -> None:
        self._count += 1
        self._counts[self._workers.rank] = self._count

    def _wait(self) -> None:
        """Wait until all workers are as far as this one."""
        begin_s = time.monotonic()
        while self._late():
            os.sched_yield()
            if time.monotonic() - begin_s > self._awake_s:
                return self._wait_long(begin_s)
        return None

    def _wait_long(self, begin_s: float) -> None:
        looked_s = begin_s
        while self._late():
            time.sleep(_NAP_S)
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_FOR_DEAD_S:
                looked_s = now_s
                self._refuse_dead()
            if now_s - begin_s > self._workers.timeout_s:
                late = ", ".join(map(str, self._late()))
                raise RuntimeError(f"timed out after {self._workers.timeout_s:g} s of waiting for worker {late}")

    def _late(self) -> list[int]:
        return [rank for rank, count in enumerate(self._counts) if count < self._count]

    def _refuse_dead(self) -> None:
        for rank in self._late():
            with suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
                if self._counts[rank] < self._count:  # it may have come just now, and left
                    raise RuntimeError(f"the connection to worker {rank} was lost")


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    begin = 0
    for tensor in tensors:
        yield tensor, slice(begin, begin + tensor.numel())
        begin += tensor.numel()


def share_memory(workers: WorkerGroup, num_values: int) -> SharedMemory | None:
    """Make memory with a slot of that many float32 values for each worker. Every worker must call it.

    None, on every worker, where they are not all on one machine, where there are very many, or where the system can't:
    it takes Linux, and a processor that shows its stores to others in the order in which they were made (x86).
    """
    if not 2 <= workers.size <= _MOST_WORKERS:
        return None
    num_bytes, token = _size_bytes(workers, num_values), secrets.token_bytes(_TOKEN_BYTES)
    descriptor = _make_file(num_bytes, token) if workers.rank == 0 else None
    made = workers.all_gather([os.getpid(), -1 if descriptor is None else descriptor, *token])[0]
    pid, number, *expected = map(round, made)
    if workers.rank > 0 and number >= 0:
        descriptor = _open_file(pid, number, num_bytes, bytes(expected))
    shared = None
    if descriptor is not None:
        try:
            shared = SharedMemory(workers, descriptor, num_values)
            workers.exit_stack.callback(shared.close)
        except OSError:
            os.close(descriptor)
    return shared if workers.all_reduce([shared is not None])[0] == workers.size else None


def _size_bytes(workers: WorkerGroup, num_values: int) -> int:
    """A line for the token, one for each worker's count, then the slots."""
    lines_of_slot = math.ceil(num_values * 4 / _LINE_BYTES)
    return _LINE_BYTES * (1 + workers.size * (1 + lines_of_slot))


def _make_file(num_bytes: int, token: bytes) -> int | None:
    """Descriptor of memory without a name, so that nothing is left of it when the workers are killed."""
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # now, and not when it is first written to
        os.pwrite(descriptor, token, 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _open_file(pid: int, number: int, num_bytes: int, token: bytes) -> int | None:
    """What that process has under that descriptor, if it is one of this machine and it is that file."""
    path = Path(f"/proc/{pid}/fd/{number}")
    try:
        if f"memfd:{_NAME}" not in str(path.readlink()):  # opening another's device might do something
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        if os.fstat(descriptor).st_size == num_bytes and os.pread(descriptor, _TOKEN_BYTES, 0) == token:
            return descriptor
    os.close(descriptor)
    return None
