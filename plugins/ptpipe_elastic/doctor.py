"""Checks of `ptpipe doctor`: torch.distributed, and a trial of collectives between processes of this machine."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ptpipe import Check, host
from ptpipe_elastic.collectives import Collective, run_collectives

if TYPE_CHECKING:
    from ptpipe_elastic.torch_elastic import WorkerFailure

_COLLECTIVES = [Collective(name, size_bytes=1 << 20, num_times=5) for name in ("all_reduce", "broadcast", "barrier")]
_TIMEOUT_S = 20.0
"""For one operation. With few processors, importing torch in each process takes part of it."""
_TIMEOUT_PER_CROWDED_S = 2.0

# Words in an error message, and the fix to suggest.
_REMEDIES = (
    (
        ("unable to find address", "ifa !="),
        "the workers of one machine connect over its loopback interface: bring it up (`ip link set lo up`; interfaces "
        "of this machine: {interfaces})",
    ),
    (
        ("getaddrinfo", "gai error", "resolve", "name or service not known"),
        "this machine's name does not resolve: add a line `127.0.0.1 localhost {host}` to /etc/hosts",
    ),
    (
        ("too many open files", "temporarily unavailable", "cannot fork", "can't start new thread"),
        "the shell's limits are too low: raise `ulimit -n` (files) and `ulimit -u` (processes)",
    ),
    (
        ("sigkill", "out of memory", "cannot allocate", "bad_alloc"),
        "memory ran out: each process needs about 0.5 GB; try fewer --workers, or raise the container's limit",
    ),
    (("no space left",), "make room in {temporary} and /dev/shm"),
)
_ANY_REMEDY = (
    "allow processes of this machine to connect over loopback (firewall, VPN); then check "
    "`ulimit -n`, free memory, and whether `localhost` and {host} resolve"
)
_NCCL_REMEDY = (
    "check the driver and all devices with `nvidia-smi`; in a container /dev/shm may be too small; "
    "NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 show which transport between the devices fails; gloo works without"
)


class _OverdueError(Exception):
    """The deadline passed."""


def checks(workers: int) -> Iterator[Check]:
    """Check torch.distributed; with 2 workers or more, also run collectives between that many processes."""
    if not dist.is_available():
        remedy = "parallel training needs a build of torch that has it; everything else works"
        yield Check.warn("torch.distributed", "missing from this build of torch", remedy)
        return
    comms = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    available = [name for name, is_available in comms.items() if is_available]
    num_devices = torch.cuda.device_count()
    if "gloo" not in available:
        yield Check.warn("comm", f"no gloo (available: {', '.join(available) or 'none'})", "CPU workers need gloo")
    elif num_devices and "nccl" not in available:
        yield Check.warn("comm", "gloo, no nccl", "a CUDA build of torch for Linux has nccl, far faster on GPUs")
    else:
        yield Check.ok("comm", ", ".join(available) + ("" if num_devices else " (nccl is for CUDA devices)"))
    if workers < 2:
        return
    if "gloo" in available:
        yield check_collectives("gloo", workers)
    if "nccl" in available and num_devices >= workers:
        yield check_collectives("nccl", workers)


def check_collectives(comm: str, workers: int, timeout_s: float | None = None) -> Check:
    """Run an all-reduce, a broadcast and a barrier between that many processes, with a deadline for the whole.

    `comm`: "gloo" or "nccl". `timeout_s`: for one operation; the whole has three times that.
    """
    from ptpipe_elastic.torch_elastic import WorkersFailed

    timeout_s = timeout_s or _TIMEOUT_S + _TIMEOUT_PER_CROWDED_S * max(0, workers - host.num_threads())
    subject = f"{workers} workers, {comm}"
    try:
        with _deadline(3 * timeout_s):
            seconds = run_collectives(_COLLECTIVES, workers, comm, timeout_s)
    except WorkersFailed as error:
        ending = _ending(error.failures[0], timeout_s)
    except _OverdueError:
        ending = f"not done within {3 * timeout_s:g} s; the processes were ended"
    except Exception as error:  # noqa: BLE001  # torch raises the errors of each of its layers
        ending = f"could not be started: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    else:
        times = zip(_COLLECTIVES, seconds, strict=True)
        figures = ", ".join(f"{each.name.replace('_', '-')} {1000 * s:.2f} ms" for each, s in times)
        return Check.ok(subject, f"{figures} (1 MiB; medians)")
    return Check.fail(subject, ending, _remedy(comm, ending))


def _ending(failure: WorkerFailure, timeout_s: float) -> str:
    """How the worker that failed first ended, and the last line of its output."""
    last = f"; its last line: {failure.last_words}" if failure.last_words else ""
    if failure.exit_code < 0:
        return f"worker {failure.rank} was killed by {failure.signal_name}{last}"
    if any(line.startswith("Timeout (") for line in failure.last_lines):  # written by faulthandler
        return f"worker {failure.rank} hung: it was not done after {2 * timeout_s:g} s"
    return f"worker {failure.rank} ended with exit code {failure.exit_code}{last}"


def _remedy(comm: str, ending: str) -> str:
    words = {
        "interfaces": ", ".join(name for _, name in socket.if_nameindex()),
        "host": socket.gethostname(),
        "temporary": tempfile.gettempdir(),
    }
    for signs, remedy in _REMEDIES:
        if any(sign in ending.lower() for sign in signs):
            return remedy.format(**words)
    return _NCCL_REMEDY if comm == "nccl" else _ANY_REMEDY.format(**words)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _OverdueError inside the block after that time. Main thread only: signals arrive there."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _OverdueError

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # restores a timer that was set before, such as pytest-timeout's
