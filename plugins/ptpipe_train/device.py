"""Device, precision and memory format that a network is trained in, and what this machine supports of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ptpipe import StageError, host
from ptpipe_torch import Batch, Data
from ptpipe_torch.cuda import finds_cuda_device
from ptpipe_torch.memory_format import use_memory_format
from ptpipe_train.config_parallel import PIPELINED
from ptpipe_train.depthwise import keep_depthwise_float32

if TYPE_CHECKING:
    from ptpipe_train.config import Device, Precision, PrecisionOption
    from ptpipe_train.config_parallel import Parallel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_CUDA = "device cuda: torch finds no CUDA device here (device auto would take the CPU)"


@dataclass(frozen=True)
class DeviceSettings:
    """Device, precision and memory format, with every `auto` resolved."""

    device: torch.device
    precision: Precision = "fp32"
    channels_last: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context that forward passes run in."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, _DTYPES[self.precision])

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return a scaler that keeps fp16 gradients in range; for other precisions it is disabled."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def place(self, module: nn.Module) -> nn.Module:
        """Move the network to the device, convert its weights to the memory format and prepare autocast, in place."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        use_memory_format(module.to(self.device), layout)
        if self.device.type == "cpu" and self.precision != "fp32":
            keep_depthwise_float32(module)
        return module

    @property
    def memory_format(self) -> str:
        """Value of the option `memory_format`."""
        return "channels_last" if self.channels_last else "contiguous"


def resolve_device(device: Device) -> torch.device:
    """Resolve `auto`. Raise StageError for a CUDA device that this machine doesn't have."""
    if reason := _unusable(device):
        raise StageError(reason)
    return _device(device)


def _device(device: Device) -> torch.device:
    if device == "auto":  # as in the key
        device = "cuda" if finds_cuda_device() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def _unusable(device: Device) -> str | None:
    """Return why torch can't use the device, or finds another one than the key names; None if neither."""
    if device == "cuda" and not torch.cuda.is_available():
        return _NO_CUDA
    if device == "auto" and finds_cuda_device() != torch.cuda.is_available():
        found = "no CUDA device, although there is a GPU" if finds_cuda_device() else "a CUDA device, but ptpipe no GPU"
        return f"device auto: torch finds {found}; set device to cpu or cuda"
    return None


def first_batch(data: Data, settings: DeviceSettings, num_samples: int, split: str = "train") -> Batch:
    """Load that many samples from the start of a split, repeating them where it is smaller; not augmented."""
    samples = data.splits[split]
    # Without the data set's loader options: a single batch isn't worth starting worker processes.
    few = Data(data.info, {split: samples.subset(np.arange(min(num_samples, len(samples))))})
    order_N = np.arange(num_samples) % len(few.splits[split])
    batches = few.batches(
        split, order_N=order_N, batch_size=num_samples, channels_last=settings.channels_last, device=settings.device
    )
    return next(iter(batches))


def find_missing(device: Device, precision: PrecisionOption) -> Iterator[str]:
    """Yield a line for each requirement of device and precision that this machine doesn't meet."""
    if reason := _unusable(device):
        yield reason
    elif precision == "fp16" and _device(device).type == "cpu" and not has_fast_fp16():
        # Measured without fp16 instructions: small_cnn takes 20 to 30 times as long as in bf16.
        yield "precision fp16: this CPU has no fp16 instructions and would take many times as long; use bf16"


def find_missing_for_workers(device: Device, parallel: Parallel) -> Iterator[str]:
    """Yield a line for each requirement of the parallel mode that this machine doesn't meet."""
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if parallel.sync_bn and not on_cuda:
        yield "parallel sync_bn: torch's SyncBatchNorm supports CUDA devices only; leave it out on a CPU"
    if parallel.comm == "nccl" and not on_cuda:
        yield "parallel comm nccl: it needs CUDA devices, and there are none here; use gloo or auto"
    if on_cuda and parallel.comm == "gloo" and (reason := _beyond_gloo(parallel)):
        yield reason
    if parallel.degrees.world_size > 1 and not torch.distributed.is_available():
        yield f"parallel mode {parallel.mode}: this build of torch has no torch.distributed"


def check_comm(device: torch.device, parallel: Parallel) -> None:
    """Raise StageError where the process group can't communicate what the parallel mode needs on that device."""
    if device.type == "cpu" or parallel.degrees.world_size == 1 or torch.distributed.get_backend() != "gloo":
        return
    if reason := _beyond_gloo(parallel):
        raise StageError(f"{reason} (this machine has {torch.cuda.device_count()})")


def _beyond_gloo(parallel: Parallel) -> str | None:
    """Return why gloo can't run a parallel mode on CUDA devices, where it only sums, broadcasts and gathers."""
    if parallel.mode not in ("fsdp", *PIPELINED):
        return None
    return (
        f"parallel mode {parallel.mode} on CUDA devices needs comm nccl, and with it a device for each worker of a "
        "machine; use mode ddp, or device cpu"
    )


def has_fast_fp16() -> bool:
    """Return whether this CPU has fp16 instructions that torch's kernels use."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Make cuDNN select its kernels deterministically inside the `with`; CPU kernels always are."""
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
    """Return what affects the last bits of a result besides the options."""
    machine = host.describe()
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else str(machine["processor"])
    return {
        "torch": str(torch.__version__),
        "number of threads": str(torch.get_num_threads()),
        "processor": f"{processor} ({machine['architecture']})",
    }
