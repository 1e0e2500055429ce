"""Process-wide settings of torch, set for a while and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ptpipe import StageError


def num_cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        raise StageError(f"backend {backend} is not offered here (there are: {', '.join(sorted(set(offered) - {'none'}))})")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = backend
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
