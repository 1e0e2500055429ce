"""Checks of the torch installation and of the hardware that it can use."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from ptpipe import Check, host, installed

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_CPU_FEATURES = ("avx2", "avx512_f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
"""Names as in `torch.cpu.get_capabilities`: the features that decide how fast float and int8 kernels are."""


def run_checks() -> Iterator[Check]:
    """Check torch and torchvision, the processor, threads and CUDA devices."""
    yield installed("torch")
    fault = _import_fault("torch")
    if fault:
        yield Check.fail("import torch", fault, "reinstall torch: pip install --force-reinstall torch")
        return
    yield from _torchvision()
    yield _processor()
    yield _threads()
    yield from _cuda()


def _import_fault(module: str) -> str:
    """Return why a module can't be imported, in one line; empty where it can."""
    import importlib

    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # an incompatible library raises ImportError, OSError or anything
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
        remedy = "install the torchvision release that matches your torch: pip install --upgrade torch torchvision"
        yield Check.fail("import torchvision", _one_line(error), remedy)


def _processor() -> Check:
    """Report the CPU features that decide the speed of float and int8 kernels."""
    import torch

    get_capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in every supported release
    capabilities = get_capabilities() if get_capabilities is not None else {}
    kernels = f"torch's kernels: {torch.backends.cpu.get_cpu_capability()}"
    if capabilities.get("architecture", "x86_64") != "x86_64" or not capabilities:
        return Check.ok("processor", kernels)
    found = [name for name in _CPU_FEATURES if capabilities.get(name)]
    detail = f"{kernels}; {', '.join(found) or 'no AVX2, AVX-512 or AMX'}"
    slow = []
    if not {"avx512_vnni", "avx_vnni"} & set(found):
        slow.append("no VNNI: int8 is slower, and weights use only 7 bits")
    if not {"avx512_bf16", "amx_bf16"} & set(found):
        slow.append("no bfloat16 arithmetic: `precision: bf16` trains slower than float32")
    return Check.warn("processor", "; ".join([detail, *slow])) if slow else Check.ok("processor", detail)


def _threads() -> Check:
    usable, total = host.num_threads(), host.total_cpus()
    detail = f"{usable} of {total} processors usable"
    if usable >= total:
        return Check.ok("threads", detail)
    return Check.warn("threads", f"{detail} (affinity, the container's limit or OMP_NUM_THREADS)")


def _cuda() -> Iterator[Check]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unsuitable driver is reported below
        is_available = torch.cuda.is_available()
    if is_available:
        yield from (_device(number) for number in range(torch.cuda.device_count()))
    elif torch.version.cuda is not None:
        remedy = "if this machine has one: check the driver with `nvidia-smi`; it must be new enough for this CUDA"
        yield Check.warn("cuda", f"torch is built for CUDA {torch.version.cuda} but finds no device", remedy)
    elif _NVIDIA_DRIVER.exists():
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        yield Check.warn("cuda", "this machine has an NVIDIA driver, but torch is a CPU build", remedy)
    else:
        yield Check.ok("cuda", "no CUDA device; everything runs on the CPU")


def _device(number: int) -> Check:
    """Compute something on a device, and report its name and memory."""
    import torch

    subject = f"cuda:{number}"
    try:
        properties = torch.cuda.get_device_properties(number)
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        ones_NN = torch.ones(32, 32, device=subject)
        is_right = bool((ones_NN @ ones_NN == 32).all())
    except Exception as error:  # noqa: BLE001  # CUDA's errors have no common base class
        remedy = "see what occupies it with `nvidia-smi`; this torch may not be built for its architecture"
        return Check.fail(subject, _one_line(error), remedy)
    memory = f"{total_bytes / 1e9:.0f} GB, {free_bytes / 1e9:.0f} GB free"
    detail = f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"
    if not is_right:
        return Check.fail(subject, f"{detail}; a product of ones was wrong", "don't use this device")
    return Check.ok(subject, detail)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
