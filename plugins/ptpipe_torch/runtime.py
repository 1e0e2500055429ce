"""Process-wide settings: environment, threads, memory, random streams."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import host

if TYPE_CHECKING:
    import torch

_STATM = Path("/proc/self/statm")
_WORTH_RETURNING_BYTES, _WORTH_COLLECTING_BYTES = 64 << 20, 16 << 20
_PARENT_CHECK_S = 0.5

# Parameter numbers of mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
# Upper ends of glibc's own adaptive thresholds (malloc.c: DEFAULT_MMAP_THRESHOLD_MAX, and trimming at twice that).
_ADAPTED_MMAP_BYTES, _ADAPTED_TRIM_BYTES = 32 << 20, 64 << 20
_KEPT_BYTES = 256 << 20
"""The largest block that is kept: smaller ones would be cut from a larger one, which no next one of its size fits."""
_LARGE_BYTES = 1 << 20
_thresholds = [(_ADAPTED_MMAP_BYTES, _ADAPTED_TRIM_BYTES)]
"""Of each context that is entered. One that is left restores those around it: glibc can't be asked for its own."""


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment inside the `with`."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Set torch's intra-op threads inside the `with`. `num_threads`: None means `ptpipe.host.num_threads()`."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or host.num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory in the process for reuse inside the `with`; changes no result.

    Every batch of a training or an evaluation allocates and frees the same large activations. glibc returns such blocks
    to the system at once, and the next batch pays thousands of page faults to get them back: a third of the time of a
    small network. On exit free memory is returned. With another C library this does nothing.
    """
    try:
        with _malloc_thresholds(_KEPT_BYTES, _NEVER):
            yield
    finally:
        _return_free_memory()


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Return each freed block of a MiB and more to the system at once inside the `with`; changes no result.

    For building and converting networks, which copy weights a few times. A copy that was cut from the heap leaves a gap
    there, in which the next one, of another size, rarely fits: the process grew by one to three times the weights. With
    another C library than glibc this does nothing.
    """
    with _malloc_thresholds(_LARGE_BYTES, _ADAPTED_TRIM_BYTES):
        yield


@contextmanager
def _malloc_thresholds(mmap_bytes: int, trim_bytes: int) -> Iterator[None]:
    """Set glibc's thresholds inside the `with`: of blocks that are mapped, and of free memory that is returned."""
    libc = _glibc()
    if libc is None:
        yield
        return
    _thresholds.append((mmap_bytes, trim_bytes))
    try:
        _apply_thresholds(libc)
        yield
    finally:
        _thresholds.pop()
        _apply_thresholds(libc)


def _apply_thresholds(libc: ctypes.CDLL) -> None:
    mmap_bytes, trim_bytes = _thresholds[-1]
    libc.mallopt(_M_TRIM_THRESHOLD, trim_bytes)
    # glibc before 2.35 accepts at most 32 MiB.
    _ = libc.mallopt(_M_MMAP_THRESHOLD, mmap_bytes) or libc.mallopt(_M_MMAP_THRESHOLD, _ADAPTED_MMAP_BYTES)


def exit_with_parent(parent_pid: int | None = None) -> None:
    """End this process soon after its parent has ended, so that a worker never outlives a killed run or its locks.

    `parent_pid`: process id of the parent; None: the present parent's. A daemon thread checks twice a second.
    """
    parent_pid = os.getppid() if parent_pid is None else parent_pid

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)  # without cleaning up: the run that would use it has ended

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def released_memory() -> Iterator[None]:
    """On exit, return free memory if the process has grown by more than 64 MiB inside the `with`, and collect garbage.

    A `torch.fx.GraphModule` and its graph refer to each other, so a network that was traced, quantized or exported is
    freed not with its last reference but by Python's cyclic collector, perhaps several copies of the weights later. A
    full collection takes 0.1 to 0.3 s with torch loaded, so it has to be worth it: garbage is collected if the process
    is larger by 16 MiB without its free memory. Does nothing where /proc is missing.
    """
    before = _resident_bytes()
    try:
        yield
    finally:
        if _resident_bytes() - before > _WORTH_RETURNING_BYTES:
            _return_free_memory()
            if _resident_bytes() - before > _WORTH_COLLECTING_BYTES:
                gc.collect()
                _return_free_memory()


def _return_free_memory() -> None:
    """Return the heap's free pages to the system; with another C library than glibc do nothing."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _resident_bytes() -> int:
    """Return the resident set size of this process; 0 where it can't be read."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if libc is not None and hasattr(libc, "gnu_get_libc_version") else None


def cpu_random_states() -> tuple[Hashable, ...]:
    """Return the states of the random streams of torch on the CPU, Python and NumPy."""
    import json
    import random

    import numpy as np
    import torch

    numpys = json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpys


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's random streams with `seed` inside the `with`; their states are restored on exit.

    `device`: an accelerator whose stream is seeded too, in addition to the CPU's.
    """
    import torch

    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def loggers_limited(names: Iterable[str], level: int = logging.ERROR) -> Iterator[None]:
    """Show nothing below a level of what these loggers, which may have levels of their own, log inside the `with`.

    `names`: the loggers'.
    """
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(level)
        yield
    finally:
        for logger, own in zip(loggers, before, strict=True):
            logger.setLevel(own)


@contextmanager
def warnings_silenced() -> Iterator[None]:
    """Show no warning inside the `with`, and no message that is logged below the level of an error."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
