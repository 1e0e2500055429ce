"""Where and how a network is trained on this machine: device, precision, memory format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import StageError, host

if TYPE_CHECKING:
    from ptpipe_train import Device, MemoryFormat, Precision
    from ptpipe_train.parallel_options import Parallel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class Settings:
    """What the options come to on this machine."""

    device: torch.device
    precision: Precision
    channels_last: bool

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes belong in this."""
        if self.precision == "fp32":
            return nullcontext()
        context: AbstractContextManager[Any] = torch.autocast(self.device.type, _DTYPES[self.precision])
        return context

    def scaler(self) -> torch.amp.GradScaler:
        """Keep fp16 gradients in range; for other precisions it changes nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def placed(self, module: nn.Module) -> nn.Module:
        """The network on its device and in its layout."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return module.to(self.device, memory_format=layout)

    @property
    def memory_format(self) -> str:
        """In the words of the option."""
        return "channels_last" if self.channels_last else "contiguous"


def choose_settings(device: Device, precision: Precision, memory_format: MemoryFormat, module: nn.Module) -> Settings:
    """Settle what the options leave open. Raises StageError for a CUDA device that isn't there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise StageError(_NO_CUDA)
    convolves = any(isinstance(layer, _CONVOLUTIONS) for layer in module.modules())
    channels_last = convolves if memory_format == "auto" else memory_format == "channels_last"
    return Settings(_device(device), precision, channels_last)


_NO_CUDA = "device cuda: torch finds no CUDA device here (device auto takes the CPU then)"


def find_lacks(device: Device, precision: Precision) -> Iterator[str]:
    """What keeps this machine from training so, a line each."""
    if device == "cuda" and not torch.cuda.is_available():
        yield _NO_CUDA
    elif precision == "fp16" and _device(device).type == "cpu" and not has_fast_fp16():
        # Measured on one that has none: small_cnn takes 20 to 30 times as long as in bf16.
        yield "precision fp16: this CPU can't calculate in fp16 and would take many times as long; use bf16"


def find_lacks_of_workers(device: Device, parallel: Parallel) -> Iterator[str]:
    """What keeps this machine from training with these workers, a line each."""
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if parallel.sync_bn and not on_cuda:
        yield "parallel sync_bn: torch's SyncBatchNorm works on CUDA devices only; leave it out on a CPU"
    if parallel.comm == "nccl" and not on_cuda:
        yield "parallel comm nccl: it talks between CUDA devices, and there is none here; use gloo or auto"
    if parallel.degrees.world_size > 1 and not torch.distributed.is_available():
        yield f"parallel mode {parallel.mode}: this build of torch has no torch.distributed"


def has_fast_fp16() -> bool:
    """Whether this CPU has fp16 instructions that torch's kernels use."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 is worth it on this device."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Let a CUDA device take the same kernels each time inside the `with`; the CPU's always are the same."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def describe_environment(device: torch.device) -> dict[str, str]:
    """What the last bits of a result depend on, beside the options."""
    facts = host.describe()
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else str(facts["processor"])
    return {
        "torch": str(torch.__version__),
        "number of threads": str(torch.get_num_threads()),
        "processor": f"{processor} ({facts['architecture']})",
    }


def _device(device: Device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
