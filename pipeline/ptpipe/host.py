"""Which machine this is: what a measured value holds for."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from functools import cache
from pathlib import Path


@cache
def describe() -> dict[str, str | int]:
    """Processor, number of usable processors, architecture, operating system: what a latency depends on."""
    return {
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "architecture": platform.machine(),
        "system": platform.system(),
        "host": platform.node(),
    }


def fingerprint() -> str:
    """Twelve hex digits that stand for `describe()`."""
    return hashlib.sha256(json.dumps(describe(), sort_keys=True).encode()).hexdigest()[:12]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware"))]
    return names[0] if names else platform.processor() or "unknown"
