"""What this machine's torch is good for: versions, processor, threads, CUDA devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from ptpipe import Check, installed
from ptpipe_torch.runtime import num_cpus

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_CPU_FEATURES = ("avx2", "avx512_f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
"""As `torch.cpu.get_capabilities` spells them: those that decide how fast float and int8 kernels are."""


def findings() -> Iterator[Check]:
    """Look at torch and torchvision, and at what they can use here."""
    yield installed("torch")
    fault = _import_fault("torch")
    if fault:
        yield Check.fail("import torch", fault, "install torch anew: pip install --force-reinstall torch")
        return
    yield from _torchvision()
    yield _processor()
    yield _threads()
    yield from _cuda()


def _import_fault(module: str) -> str:
    """Why a module can't be imported, in one line; empty where it can."""
    import importlib

    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # a library that doesn't fit raises ImportError, OSError or anything
        return _one_line(error)
    return ""


def _torchvision() -> Iterator[Check]:
    version = installed("torchvision")
    yield version
    if version.detail == "is not installed":
        return
    from ptpipe_torch.torchvision_compat import torchvision

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torchvision()
    except Exception as error:  # noqa: BLE001  # a build for another torch may raise anything
        remedy = "install the torchvision release that belongs to your torch: pip install --upgrade torch torchvision"
        yield Check.fail("import torchvision", _one_line(error), remedy)


def _processor() -> Check:
    """Name the processor's features that float and int8 kernels live on."""
    import torch

    says = getattr(torch.cpu, "get_capabilities", None)  # not in every supported release
    facts = says() if says is not None else {}
    kernels = f"torch's kernels: {torch.backends.cpu.get_cpu_capability()}"
    if facts.get("architecture", "x86_64") != "x86_64" or not facts:
        return Check.ok("processor", kernels)
    there = [name for name in _CPU_FEATURES if facts.get(name)]
    detail = f"{kernels}; {', '.join(there) or 'none of the features that matter'}"
    slow = []
    if not {"avx512_vnni", "avx_vnni"} & set(there):
        slow.append("no VNNI: int8 is slower, and activations keep to 7 bits")
    if not {"avx512_bf16", "amx_bf16"} & set(there):
        slow.append("no bfloat16 arithmetic: `precision: bf16` trains slower than float32")
    return Check.warn("processor", "; ".join([detail, *slow])) if slow else Check.ok("processor", detail)


def _threads() -> Check:
    import os

    present = os.cpu_count() or 1
    usable = num_cpus()
    detail = f"{usable} of {present} processors usable"
    if usable >= present:
        return Check.ok("threads", detail)
    return Check.warn("threads", f"{detail} (affinity, the container's limit or OMP_NUM_THREADS)")


def _cuda() -> Iterator[Check]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that doesn't fit is said below
        is_available = torch.cuda.is_available()
    if is_available:
        yield from (_device(number) for number in range(torch.cuda.device_count()))
    elif torch.version.cuda is not None:
        remedy = "if it has one: `nvidia-smi` shows whether the driver works; it must be new enough for this CUDA"
        yield Check.warn("cuda", f"torch is built for CUDA {torch.version.cuda} and finds no device", remedy)
    elif _NVIDIA_DRIVER.exists():
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        yield Check.warn("cuda", "this machine has an NVIDIA driver, and torch is a CPU build", remedy)
    else:
        yield Check.ok("cuda", "none; all works on the CPU")


def _device(number: int) -> Check:
    """Let a device compute something, and say what it is."""
    import torch

    subject = f"cuda:{number}"
    try:
        facts = torch.cuda.get_device_properties(number)
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        ones_NN = torch.ones(32, 32, device=subject)
        is_right = bool((ones_NN @ ones_NN == 32).all())
    except Exception as error:  # noqa: BLE001  # CUDA's errors have no common base
        remedy = "`nvidia-smi` shows what occupies it; a torch built for its architecture may be missing"
        return Check.fail(subject, _one_line(error), remedy)
    memory = f"{total_bytes / 1e9:.0f} GB, {free_bytes / 1e9:.0f} GB free"
    detail = f"{facts.name}, {memory}, compute capability {facts.major}.{facts.minor}"
    if not is_right:
        return Check.fail(subject, f"{detail}; a product of ones was wrong", "don't use this device: it is broken")
    return Check.ok(subject, detail)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
