"""Host facts: processor, instruction sets, usable CPUs, threads; the fingerprint that measured results depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
VNNI_FLAGS = ("avx512_vnni", "avx_vnni")
"""Names of VNNI's two forms among `cpu_flags`: of 512 bits and of 256."""
_X86 = ("x86_64", "amd64", "i386", "i686", "x86")


def describe() -> dict[str, str | int]:
    """Return what a latency depends on: processor, usable CPUs, threads, architecture, operating system, host name.

    Affinity, container limit and OMP_NUM_THREADS are read at each call: they may change while a process runs.
    """
    return {
        "processor": processor_name(),
        "num_cpus": usable_cpus(),
        "num_threads": num_threads(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "host": platform.node(),
    }


def fingerprint() -> str:
    """Return twelve hex digits of the hash of `describe()`: part of the key of every stage with `per_machine`."""
    return hashlib.sha256(json.dumps(describe(), sort_keys=True).encode()).hexdigest()[:12]


def num_threads() -> int:
    """Return how many threads a computation with all of the machine takes: `usable_cpus()`, at most OMP_NUM_THREADS."""
    return min(usable_cpus(), omp_threads() or usable_cpus())


def usable_cpus() -> int:
    """Return how many CPUs this process and its children may use: its affinity, at most the limit of its cgroups."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total_cpus()
    return max(1, min(affinity, _cgroup_cpus() or affinity))


def total_cpus() -> int:
    """Return how many CPUs the machine has, whatever this process may use of them."""
    return os.cpu_count() or 1


def omp_threads() -> int | None:
    """Return OMP_NUM_THREADS as a number; None where it is unset or not a positive number."""
    # The variable may be a list, one number for each level of nesting (OpenMP 5.2, section 21.2.2).
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


@cache
def processor_name() -> str:
    """Return the processor's name as /proc/cpuinfo or Python's `platform` has it; `unknown` where neither does."""
    return next(iter(_cpuinfo_values(CPUINFO, "model name", "Hardware")), "") or platform.processor() or "unknown"


def is_x86(architecture: str | None = None) -> bool:
    """Return whether `architecture`, as `platform.machine()` names it, is x86; None: that of this machine."""
    return (architecture or platform.machine()).lower() in _X86


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str] | None:
    """Return the instruction sets of an x86 processor (`avx2`, `avx512_vnni`), as the file `cpuinfo` has them.

    None where they can't be read.
    """
    lines = _cpuinfo_values(cpuinfo, "flags")
    return frozenset(lines[0].split()) if lines else None


def _cgroup_cpus() -> int | None:
    """Return the whole CPUs that this process's cgroups grant; None where no limit can be read."""
    granted = (_granted_cpus(folder) for folder in _cgroup_folders())
    return min((cpus for cpus in granted if cpus is not None), default=None)


def _cgroup_folders() -> Iterator[Path]:
    """Yield the folder of the cgroup that limits CPUs, and of those around it, for versions 1 and 2 (cgroups(7))."""
    try:
        lines = PROCESS_CGROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    yield CGROUPS  # a container's own, wherever it is in the hierarchy of its host
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            root = CGROUPS / "cpu" if controllers else CGROUPS
            yield root
            group = root / path.strip("/")
            yield from (folder for folder in (group, *group.parents) if root in folder.parents)


def _granted_cpus(folder: Path) -> int | None:
    """Return the whole CPUs that one cgroup grants; None where it has no limit."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota_us, period_us = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
            if int(quota_us) > 0:  # -1: no limit
                return max(1, int(quota_us) // int(period_us))
        except (OSError, ValueError):  # no such file, or "max 100000": no limit
            continue
    return None


def _cpuinfo_values(cpuinfo: Path, *names: str) -> list[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() in names]
