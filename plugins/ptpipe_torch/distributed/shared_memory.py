"""All-reduce over the workers of one machine, through memory that all of them map.

gloo's messages pass through the network stack, and a waiting worker sleeps until it is woken: both cost CPU time that
training on CPUs needs itself. Here each worker writes into its slot, increments its counter, waits until all counters
agree, and reads all slots.
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
_MAX_WORKERS = 8
"""Every worker reads all slots: with more workers a ring all-reduce moves less data."""
_LINE_BYTES = 64
"""Cache line: counters of different workers must not share one (false sharing)."""
_NAME = "ptpipe"
_TOKEN_BYTES = 16
_SPIN_S = 0.02
"""How long a worker spins before it sleeps between polls."""
_POLL_S = 0.0005
_DEAD_CHECK_S = 0.25


class SharedMemory:
    """A slot of float32 values per worker. All workers must call the same operations in the same order."""

    def __init__(self, workers: WorkerGroup, descriptor: int, num_values: int) -> None:
        """Map the file of `share_memory`; takes ownership of `descriptor`, which a worker has locked while it is alive.

        `workers`, `num_values`: as in `share_memory`.
        """
        self._workers, self._descriptor, self._count = workers, descriptor, 0
        # Spinning takes CPU time from other workers where there isn't a CPU for every thread.
        self._spin_s = _SPIN_S if workers.size * torch.get_num_threads() <= usable_cpus() else 0.0
        self._memory = mmap.mmap(descriptor, _size_bytes(workers, num_values))
        counts_end = _LINE_BYTES * (1 + workers.size)
        self._counts = memoryview(self._memory)[_LINE_BYTES:counts_end].cast("q")[:: _LINE_BYTES // 8]
        slots = torch.frombuffer(self._memory, dtype=torch.float32, offset=counts_end)
        self._slots = slots.view(workers.size, -1)[:, :num_values]
        # The kernel releases the lock when the file is closed or this process ends, however it ends.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, workers.rank)

    def close(self) -> None:
        """Unmap the memory; this object must not be used afterwards."""
        self._counts.release()
        del self._counts, self._slots
        with suppress(BufferError):  # a traceback may still refer to it
            self._memory.close()
        os.close(self._descriptor)

    def reduce(self, tensors: Sequence[torch.Tensor], operation: Operation) -> None:
        """All-reduce `tensors` (float32, contiguous, on the CPU) in place. `operation`: "sum" or "min".

        Bit-identical on every worker: slots are combined in the order of ranks. Raises RuntimeError, as a process group
        does, where another worker has ended or does not arrive within the group's timeout.
        """
        combine = _OPERATIONS[operation]
        assert sum(tensor.numel() for tensor in tensors) <= self._slots.shape[1], "the tensors exceed a slot"
        self._wait()  # until all workers have read the slots of the previous operation
        own = self._slots[self._workers.rank]
        for tensor, span in _spans(tensors):
            own[span].copy_(tensor.view(-1))
        self._step()
        self._wait()
        for tensor, span in _spans(tensors):
            values, (first, second, *others) = tensor.view(-1), [slot[span] for slot in self._slots]
            combine(first, second, out=values)
            for other in others:
                combine(values, other, out=values)
        self._step()

    def _step(self) -> None:
        self._count += 1
        self._counts[self._workers.rank] = self._count

    def _wait(self) -> None:
        """Wait until the counters of all workers have reached this one's."""
        begin_s = time.monotonic()
        while self._late():
            os.sched_yield()
            if time.monotonic() - begin_s > self._spin_s:
                return self._wait_long(begin_s)
        return None

    def _wait_long(self, begin_s: float) -> None:
        checked_s = begin_s
        while self._late():
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            if now_s - checked_s > _DEAD_CHECK_S:
                checked_s = now_s
                self._raise_if_dead()
            if now_s - begin_s > self._workers.timeout_s:
                late = ", ".join(map(str, self._late()))
                raise RuntimeError(f"timed out after {self._workers.timeout_s:g} s of waiting for worker {late}")

    def _late(self) -> list[int]:
        return [rank for rank, count in enumerate(self._counts) if count < self._count]

    def _raise_if_dead(self) -> None:
        for rank in self._late():
            with suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
                if self._counts[rank] < self._count:  # it may have arrived and ended just now
                    raise RuntimeError(f"the connection to worker {rank} was lost")


def _spans(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    begin = 0
    for tensor in tensors:
        yield tensor, slice(begin, begin + tensor.numel())
        begin += tensor.numel()


def share_memory(workers: WorkerGroup, num_values: int) -> SharedMemory | None:
    """Map memory with a slot of `num_values` float32 values for each of `workers`. Every worker must call it.

    Returns None on every worker where they are on several machines or more than eight, or where the system doesn't
    support it: it needs Linux and a CPU whose stores become visible in program order (x86).
    """
    if not 2 <= workers.size <= _MAX_WORKERS:
        return None
    num_bytes, token = _size_bytes(workers, num_values), secrets.token_bytes(_TOKEN_BYTES)
    descriptor = _make_file(num_bytes, token) if workers.rank == 0 else None
    gathered = workers.all_gather([os.getpid(), -1 if descriptor is None else descriptor, *token])[0]
    pid, number, *expected = map(round, gathered)
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
    """Size of the file: a cache line for the token, one per counter, then the slots."""
    lines_of_slot = math.ceil(num_values * 4 / _LINE_BYTES)
    return _LINE_BYTES * (1 + workers.size * (1 + lines_of_slot))


def _make_file(num_bytes: int, token: bytes) -> int | None:
    """Return the descriptor of an anonymous file, so that nothing is left of it when the workers are killed."""
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # fails here if memory is short, not at the first write
        os.pwrite(descriptor, token, 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _open_file(pid: int, number: int, num_bytes: int, token: bytes) -> int | None:
    """Open another process's descriptor, if that process is on this machine and it is the expected file."""
    path = Path(f"/proc/{pid}/fd/{number}")
    try:
        if f"memfd:{_NAME}" not in str(path.readlink()):  # opening a device file may have side effects
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        if os.fstat(descriptor).st_size == num_bytes and os.pread(descriptor, _TOKEN_BYTES, 0) == token:
            return descriptor
    os.close(descriptor)
    return None
