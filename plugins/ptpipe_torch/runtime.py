"""Process-wide settings of torch and of the C library, set for a while and put back."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import StageError, host

if TYPE_CHECKING:
    import torch

_STATM = Path("/proc/self/statm")
_WORTH_COLLECTING_BYTES = 64 << 20
# malloc.h: parameter numbers of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
# Where glibc's own adaptive thresholds end (malloc.c: DEFAULT_MMAP_THRESHOLD_MAX, and trimming at twice that).
_ADAPTED_MMAP_BYTES, _ADAPTED_TRIM_BYTES = 32 << 20, 64 << 20


def num_cpus() -> int:
    """Return how many threads a computation with all of the machine takes: `ptpipe.host.num_threads()`."""
    return host.num_threads()


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
    libc = _glibc()
    if libc is None:
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
def released_memory() -> Iterator[None]:
    """Give back what became garbage inside the `with`, where the process has grown by more than 64 MiB.

    A `torch.fx.GraphModule` and its graph refer to each other, so a network that was traced, quantized or exported is
    freed not with its last reference but when Python's collector next looks at old objects, perhaps several copies of
    the weights later. Looking takes about 0.1 s with torch loaded, hence the condition. Linux only; elsewhere the
    collector's own time will do.
    """
    before = _resident_bytes()
    try:
        yield
    finally:
        if _resident_bytes() - before > _WORTH_COLLECTING_BYTES:
            gc.collect()
            libc = _glibc()
            if libc is not None:
                libc.malloc_trim(0)


def _resident_bytes() -> int:
    """Resident set size of this process; 0 where it can't be read."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, where it is glibc."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if libc is not None and hasattr(libc, "gnu_get_libc_version") else None


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw torch's random numbers from this seed inside the `with`; the streams outside are left as they were.

    `device`: the accelerator whose stream counts too, beside the CPU's.
    """
    import torch

    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def quantized_engine(backend: str | None) -> Iterator[None]:
    """Let torch's int8 operators run on this engine inside the `with`; None changes nothing.

    Raises StageError where this build of torch or this machine doesn't offer it.
    """
    if backend is None:
        yield
        return
    import torch

    offered = torch.backends.quantized.supported_engines
    if backend not in offered:
        raise StageError(
            f"backend {backend} is not offered here (there are: {', '.join(sorted(set(offered) - {'none'}))})"
        )
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = backend
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
