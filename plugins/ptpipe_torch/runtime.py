"""Process-wide settings of torch and of the C library, set for a while and put back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")

# malloc.h: parameter numbers of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
# Where glibc's own adaptive thresholds end (malloc.c: DEFAULT_MMAP_THRESHOLD_MAX, and trimming at twice that).
_ADAPTED_MMAP_BYTES, _ADAPTED_TRIM_BYTES = 32 << 20, 64 << 20


def num_cpus() -> int:
    """How many processors this process may use: its affinity, its container's limit and OMP_NUM_THREADS."""
    available = available_cpus()
    return min(available, _omp_threads() or available)


def available_cpus() -> int:
    """How many processors there are for this process and those beside it: its affinity, its container's limit."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _cgroup_cpus(_CGROUP_CPU_MAX) or affinity))


def _cgroup_cpus(cpu_max: Path) -> int | None:
    """Whole processors that a cgroup (version 2) grants, None where there is no limit to be read."""
    try:
        quota_us, period_us = cpu_max.read_text(encoding="ascii").split()
        return max(1, int(quota_us) // int(period_us))
    except (OSError, ValueError):  # no such file, or "max 100000": no limit
        return None


def _omp_threads() -> int | None:
    # The variable may be a list, one number for each level of nesting.
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


@contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Let torch's operators use that many threads (None: all of the machine) inside the `with`."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or num_cpus())
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the process keep freed memory for its next use inside the `with`; changes no result.

    A training step allocates and frees the same large activations again and again. glibc hands such blocks back to
    the system at once, and the next step pays thousands of page faults to get them again: a third of the time of
    a small network. Afterwards glibc's thresholds stand where its own adaptation ends, and what is free is given
    back. Where the C library is another one, nothing is changed.
    """
    import ctypes

    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    # Before glibc 2.35 no more than 32 MiB was accepted.
    _ = libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) or libc.mallopt(_M_MMAP_THRESHOLD, _ADAPTED_MMAP_BYTES)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _ADAPTED_MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _ADAPTED_TRIM_BYTES)
        libc.malloc_trim(0)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw torch's random numbers from this seed inside the `with`; the streams outside are left as they were.

    `device`: the accelerator whose stream counts too, beside the CPU's.
    """
    import torch

    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
