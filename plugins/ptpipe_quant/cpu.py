"""Whether this processor sums 8-bit products without overflow. Imports neither torch nor numpy.

Without VNNI, int8 kernels on x86 multiply with `vpmaddubsw`, which adds two products of an unsigned and a signed
byte into 16 signed bits and saturates: 255 * 127 + 255 * 127 does not fit, 255 * 64 + 255 * 64 does. Exact sums
require 7-bit weights there. `vpdpbusd` (VNNI) accumulates in 32 bits; `saturation.py` has the layers that do not
use it. qnnpack widens to 16 bits before it multiplies. Source: Intel, Lower Numerical Precision Deep Learning
Inference and Training, 2018.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal, TypeAlias

from ptpipe import host

Backend: TypeAlias = Literal["fbgemm", "qnnpack", "x86", "onednn"]

# Flag names of /proc/cpuinfo. Only oneDNN has kernels for the 256-bit form of processors without AVX-512; torch's
# `x86` runs layers on oneDNN if the processor has AVX512-VNNI, else on fbgemm.
_SUFFICIENT_FLAGS = {"fbgemm": ("avx512_vnni",), "x86": ("avx512_vnni",), "onednn": host.VNNI_FLAGS}


def default_backend() -> Backend:
    """Return the engine that `backend: auto` stands for on this processor: fbgemm's kernels are for x86 alone."""
    return "fbgemm" if host.is_x86() else "qnnpack"


def wants_reduced_range(
    backend: Backend, *, architecture: str | None = None, cpuinfo: Path = host.CPUINFO
) -> tuple[bool, str]:
    """Return whether weights must be reduced to 7 bits on this processor, and the reason.

    For an x86 processor of unknown features (`cpuinfo` can't be read), True, which is safe.
    """
    if backend == "qnnpack":
        return False, "qnnpack's sums do not overflow (those of its ONNX files may, on x86 without VNNI)"
    architecture = architecture or platform.machine()
    if not host.is_x86(architecture):
        return False, f"{architecture} kernels do not overflow"
    flags = host.cpu_flags(cpuinfo)
    if flags is None:
        return True, f"{cpuinfo} can't be read, so this processor may not have VNNI"
    found = [flag for flag in _SUFFICIENT_FLAGS[backend] if flag in flags]
    if found:
        return False, f"this processor has {found[0]}"
    return True, f"this processor has no {' or '.join(_SUFFICIENT_FLAGS[backend])}"
