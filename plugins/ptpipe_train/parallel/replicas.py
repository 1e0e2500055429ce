"""Copies of the network: one alone, torch's DataParallel, and DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ptpipe import JSON, Context, StageError
from ptpipe_torch import Batch, RangeObserver
from ptpipe_torch.distributed.shared_memory import SharedMemory, share_memory
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_train.evaluation import buffers_kept
from ptpipe_train.parallel.buffers import RangeUnion, SharedBuffers
from ptpipe_train.parallel.gradients import SharedAverage, average_compressed
from ptpipe_train.parallel.share import Share, is_idle
from ptpipe_train.parallel.way import Objective, Way
from ptpipe_train.parallel_options import Parallel
from ptpipe_train.settings import Settings


class Alone(Way):
    """One process, on one device or on several through `wrapped`."""

    def __init__(self, module: nn.Module, settings: Settings, wrapped: nn.Module | None = None) -> None:
        super().__init__(module, settings)
        self.wrapped = module if wrapped is None else wrapped

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        with self.times.part("forward"):
            with self.settings.autocast():
                logits_NK = self.wrapped(batch.images_NCHW)
            loss = objective(logits_NK, batch.labels_N)
        with self.times.part("backward"):
            scaler.scale(loss).backward()
        return loss.detach()


def data_parallel(module: nn.Module, settings: Settings, options: Parallel, ctx: Context) -> Alone:
    """Torch's DataParallel over the CUDA devices; with fewer than two, one process on one device.

    Raises StageError for fake quantization on several: each device would see the range of its own share alone.
    """
    available = torch.cuda.device_count() if settings.device.type == "cuda" else 0
    wanted = options.device_ids or range(available)
    devices = [number for number in wanted if number < available]
    if len(devices) < 2:
        which = f"{len(devices)} of device_ids" if options.device_ids else str(available)
        ctx.notice(f"parallel mode dp: {which} CUDA devices here; one replica does all the work")
        return Alone(settings.placed(module), settings)
    if any(isinstance(layer, RangeObserver) for layer in module.modules()):
        raise StageError("dp can't train fake quantization: each device would see its own range; use mode ddp")
    # Images, labels and the module that is replicated are on the first of them.
    settings = replace(settings, device=torch.device("cuda", devices[0]))
    module = settings.placed(module)
    return Alone(module, settings, nn.DataParallel(module, devices))


class Replicas(Way):
    """A copy of the network in each process, with its share of each batch: DistributedDataParallel.

    Ranges that fake quantization sees are united in the forward pass: all ranks have those of the whole batch.
    Batch norm normalizes by a rank's own share; its running statistics are averaged over ranks after each epoch.
    """

    def __init__(self, module: nn.Module, settings: Settings, options: Parallel, workers: WorkerGroup) -> None:
        super().__init__(module, settings)
        self.workers, self.share = workers, Share(workers.rank, workers.size)
        if options.sync_bn:
            module = self.module = self.trained = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        memory = _memory_for(module, settings, options, workers)
        self.comm = "shared memory" if memory else dist.get_backend()
        self._ranges, self._buffers = RangeUnion(module, workers, memory=memory), SharedBuffers(module)
        self._wrapped = _distributed(module, settings, options)
        average: Callable[[dist.GradBucket], Any] | None = None
        if memory:
            average = SharedAverage(memory, workers.size)
        elif options.compress and options.compress != "none":
            average = partial(average_compressed, options.compress)
        if average:
            # torch compares a hook's annotations with its own types, and ours are text until somebody asks.
            self._wrapped.register_comm_hook(None, lambda _, bucket: average(bucket))
        self.times.watch(module.parameters())

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        self._ranges.takes_part = counts = not is_idle(batch)
        # To the end of the backward pass, which looks whether what it needs was changed.
        with buffers_kept(self.module, only_if=not counts), self._synchronized(last):
            with self.times.part("forward"):
                with self.settings.autocast():
                    logits_NK = self._wrapped(batch.images_NCHW)
                loss = objective(logits_NK, batch.labels_N)
            with self.times.backward():
                # DistributedDataParallel averages over ranks what is to be summed.
                scaler.scale(loss * self.workers.size).backward()
        return loss.detach()

    def _synchronized(self, last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nullcontext() if last else self._wrapped.no_sync()
        return context

    def gather(self) -> None:
        self._buffers.unite()

    def facts(self) -> dict[str, JSON]:
        return {"comm": self.comm}


def _memory_for(module: nn.Module, settings: Settings, options: Parallel, workers: WorkerGroup) -> SharedMemory | None:
    """Where gradients and ranges of one machine's processors are brought together, if that can be done."""
    if options.comm not in (None, "auto") or options.compress not in (None, "none") or settings.device.type != "cpu":
        return None
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(parameter.dtype != torch.float32 for parameter in trained):
        return None
    return share_memory(workers, max(2, sum(parameter.numel() for parameter in trained)))


# torch 2.13 gave the option of not sending buffers at each step a new name, and warns of the old one.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
_WITHOUT_BUFFERS = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


def _distributed(module: nn.Module, settings: Settings, options: Parallel) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        module,
        device_ids=[settings.device.index] if settings.device.type == "cuda" else None,
        **_WITHOUT_BUFFERS,
        init_sync=False,  # every rank read the same model
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view is not False,
        static_graph=bool(options.static_graph),
        find_unused_parameters=bool(options.find_unused),
    )
