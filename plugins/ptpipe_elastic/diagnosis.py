"""Whether several processes of this machine can work together: tried, not looked up."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ptpipe import Check
from ptpipe_torch.runtime import num_cpus

if TYPE_CHECKING:
    from ptpipe_elastic.torch_elastic import WorkerFailure

_TIMEOUT_S = 20.0
"""How long an operation may take. Where processors are few, importing torch in each process takes its share of it."""
_TIMEOUT_PER_CROWDED_S = 2.0

_REMEDIES = (
    (("unable to find address", "ifa !="), "let GLOO_SOCKET_IFNAME name an interface of this machine ({interfaces})"),
    (
        ("getaddrinfo", "gai error", "resolve", "name or service not known"),
        "this machine's name leads nowhere: add a line `127.0.0.1 localhost {host}` to /etc/hosts",
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
    "let processes of this machine talk over loopback (firewall, VPN), try GLOO_SOCKET_IFNAME=lo; then look at "
    "`ulimit -n`, free memory, and whether `localhost` and {host} resolve"
)
_NCCL_REMEDY = (
    "`nvidia-smi` shows whether the driver and all devices work; in a container /dev/shm may be too small; "
    "NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 show which way between the devices fails; gloo works without"
)


class _OverdueError(Exception):
    """The deadline passed."""


def findings(workers: int) -> Iterator[Check]:
    """Look at torch.distributed; with 2 workers or more, let so many processes work together."""
    if not dist.is_available():
        remedy = "parallel training needs a build of torch with it; all else works"
        yield Check.warn("torch.distributed", "this build of torch has none", remedy)
        return
    there = [name for name, is_there in _comms().items() if is_there]
    num_devices = torch.cuda.device_count()
    if "gloo" not in there:
        yield Check.warn("comm", f"no gloo (there is: {', '.join(there) or 'none'})", "CPU workers need gloo")
    elif num_devices and "nccl" not in there:
        yield Check.warn("comm", "gloo, no nccl", "a CUDA build of torch for Linux has nccl, far faster on GPUs")
    else:
        yield Check.ok("comm", ", ".join(there) + ("" if num_devices else " (nccl is for CUDA devices)"))
    if workers < 2:
        return
    if "gloo" in there:
        yield worked_together("gloo", workers)
    if "nccl" in there and num_devices >= workers:
        yield worked_together("nccl", workers)


def _comms() -> dict[str, bool]:
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def worked_together(comm: str, workers: int, timeout_s: float | None = None) -> Check:
    """Let so many processes do an all-reduce, a broadcast and a barrier, with a deadline for all of it.

    `timeout_s`: how long an operation may take; the whole has three times that.
    """
    from ptpipe_elastic.torch_elastic import WorkersFailed, run_workers

    timeout_s = timeout_s or _TIMEOUT_S + _TIMEOUT_PER_CROWDED_S * max(0, workers - num_cpus())
    with tempfile.TemporaryDirectory(prefix="ptpipe-doctor-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "times.json")
        try:
            with _deadline(3 * timeout_s):
                run_workers("ptpipe_elastic.check", [comm, str(timeout_s), str(file)], workers, Path(folder, "logs"))
            times_ms = json.loads(file.read_text(encoding="utf-8"))
        except WorkersFailed as error:
            return _failed(comm, workers, _ending(error.failures[0], timeout_s))
        except _OverdueError:
            return _failed(comm, workers, f"not done within {3 * timeout_s:g} s; they were ended")
        except Exception as error:  # noqa: BLE001  # torch raises what each layer of it met
            return _failed(comm, workers, f"could not be started: {type(error).__name__}: {_first_line(str(error))}")
    figures = ", ".join(f"{name.replace('_', '-')} {ms:.2f} ms" for name, ms in times_ms.items())
    return Check.ok(_subject(comm, workers), f"{figures} (1 MiB; medians)")


def _failed(comm: str, workers: int, ending: str) -> Check:
    return Check.fail(_subject(comm, workers), ending, _remedy(comm, ending))


def _subject(comm: str, workers: int) -> str:
    return f"{workers} workers, {comm}"


def _ending(failure: WorkerFailure, timeout_s: float) -> str:
    """How the worker that failed first ended, and what it said last."""
    last = failure.message or next((line.strip() for line in reversed(failure.last_lines) if line.strip()), "")
    if failure.exit_code < 0:
        return f"worker {failure.rank} was killed by {failure.signal_name}" + _quoted(last)
    if any(line.startswith("Timeout (") for line in failure.last_lines):  # faulthandler's word
        return f"worker {failure.rank} hung: it was not done after {2 * timeout_s:g} s"
    return f"worker {failure.rank} ended with exit code {failure.exit_code}" + _quoted(last)


def _quoted(line: str) -> str:
    return f"; its last line: {line}" if line else ""


def _remedy(comm: str, ending: str) -> str:
    words = {
        "interfaces": ", ".join(name for _, name in socket.if_nameindex()),
        "host": socket.gethostname(),
        "temporary": tempfile.gettempdir(),
    }
    wrong_name = os.environ.get("GLOO_SOCKET_IFNAME")
    for signs, remedy in _REMEDIES:
        if any(sign in ending.lower() for sign in signs):
            known = remedy.format(**words)
            return f"{known}; it is {wrong_name!r}: unset it" if wrong_name and "IFNAME" in remedy else known
    return _NCCL_REMEDY if comm == "nccl" else _ANY_REMEDY.format(**words)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _OverdueError inside the `with` when the time is over; only in the main thread, where signals arrive."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _OverdueError

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # another's, if there was one
