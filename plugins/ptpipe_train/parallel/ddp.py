"""Replicas of the network: a single process, torch's DataParallel, and DistributedDataParallel."""

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
from torch.nn.parallel import DistributedDataParallel

from ptpipe import JSON, Context, StageError
from ptpipe_torch import Batch, RangeObserver
from ptpipe_torch.distributed.shared_memory import SharedMemory, share_memory
from ptpipe_torch.model.outputs import named_outputs
from ptpipe_torch.python_file import seeded_everywhere
from ptpipe_train.compiling import compiled
from ptpipe_train.config_parallel import Parallel
from ptpipe_train.cuda_graphs import CudaGraphs
from ptpipe_train.device import DeviceSettings
from ptpipe_train.evaluation import buffers_restored
from ptpipe_train.losses import backward
from ptpipe_train.parallel.batch_shard import BatchShard
from ptpipe_train.parallel.buffers import BufferSync, RangeSync, find_written
from ptpipe_train.parallel.gradients import SharedAverage, average_compressed
from ptpipe_train.parallel.strategy import Objective, ParallelStrategy, TrainingInputs


class SingleProcess(ParallelStrategy):
    """One process, on one device or, through `wrapped`, on several."""

    def __init__(self, module: nn.Module, settings: DeviceSettings, wrapped: nn.Module | None = None) -> None:
        super().__init__(module, settings)
        self.wrapped = module if wrapped is None else wrapped

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        with self.times.part("forward"):
            loss = self._forward(batch, objective)
        with self.times.part("backward"):
            backward(scaler.scale(loss))
        return loss.detach()

    def _forward(self, batch: Batch, objective: Objective) -> torch.Tensor:
        with self.settings.autocast():
            returned = self.wrapped(*batch.args)
        return objective(returned, batch)

    def pass_size(self, batch_size: int) -> int:
        devices = len(self.wrapped.device_ids) if isinstance(self.wrapped, nn.DataParallel) else 1
        return -(-batch_size // devices)


class CapturedProcess(SingleProcess):
    """One process whose passes are CUDA graphs, where the network allows that."""

    def __init__(self, module: nn.Module, settings: DeviceSettings, log: Callable[[str], None]) -> None:
        super().__init__(module, settings)
        self._graphs = CudaGraphs(module, log)

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        def passes(batch: Batch) -> torch.Tensor:
            loss = self._forward(batch, objective)
            backward(scaler.scale(loss))
            return loss.detach()

        with self.times.part("forward_backward"):
            return self._graphs.run(passes, batch, objective.num_samples, last=last)

    def metrics(self) -> dict[str, JSON]:
        return {"cuda_graph_replays": self._graphs.num_replays}


def data_parallel(module: nn.Module, settings: DeviceSettings, options: Parallel, ctx: Context) -> SingleProcess:
    """Wrap the network in torch's DataParallel; with fewer than two CUDA devices, train in one process on one device.

    Raise StageError for fake quantization on several devices: each would observe the range of its own shard alone.
    """
    available = torch.cuda.device_count() if settings.device.type == "cuda" else 0
    wanted = options.device_ids or range(available)
    devices = [index for index in wanted if index < available]
    if len(devices) < 2:
        which = f"{len(devices)} of device_ids" if options.device_ids else str(available)
        ctx.notice(f"parallel mode dp: {which} CUDA devices available; training with a single replica")
        return SingleProcess(settings.place(module), settings)
    if any(isinstance(layer, RangeObserver) for layer in module.modules()):
        raise StageError("dp can't train fake quantization: each device would observe its own range; use mode ddp")
    # DataParallel scatters from the first device: inputs, targets and the source module must be there.
    settings = replace(settings, device=torch.device("cuda", devices[0]))
    module = settings.place(module)
    return SingleProcess(module, settings, nn.DataParallel(module, devices))


class DDPStrategy(ParallelStrategy):
    """A replica of the network in each process, trained on its shard of each batch: DistributedDataParallel.

    Ranges of fake quantization are all-reduced in the forward pass, so every rank has those of the whole batch. Batch
    norm normalizes by a rank's own shard; its running statistics are averaged over ranks after each epoch. What else a
    pass writes to buffers is rank 0's on all ranks.
    """

    def __init__(self, inputs: TrainingInputs) -> None:
        settings, options, workers = inputs.settings, inputs.options, inputs.workers
        module = settings.place(inputs.module)
        if options.sync_bn:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]  # torch's own
        super().__init__(module, settings)
        self.workers, self.batch_shard = workers, BatchShard(workers.rank, workers.size)
        memory = _gradient_memory(module, inputs)
        self.comm = "shared memory" if memory else dist.get_backend()
        self._ranges = RangeSync(module, workers, memory=memory)
        self._buffers = BufferSync(module, written=find_written(inputs))
        self._wrapped = _distributed(compiled(module) if inputs.compile else module, settings, options)
        average: Callable[[Any], Any] | None = None
        if memory:
            average = SharedAverage(memory, workers.size)
        elif options.compress and options.compress != "none":
            average = partial(average_compressed, options.compress)
        if average:
            # torch compares a hook's annotations with its own types, and ours are strings (PEP 563).
            self._wrapped.register_comm_hook(None, lambda _, bucket: average(bucket))
        if workers.size > 2 and not memory and not options.find_unused and not options.static_graph:
            self._settle_buckets(inputs)
        self.times.watch(module.parameters())

    def _settle_buckets(self, inputs: TrainingInputs) -> None:
        """Let torch order the gradients in its messages now: by when they were ready in the first backward pass.

        Later that would be after the first step of a fresh and of a resumed training. Where a gradient is in a message
        decides in which order those of three workers or more are added, and so its last bits.
        """
        arguments = inputs.first_inputs(self.batch_shard.size(inputs.batch_size))
        with seeded_everywhere(0, self.settings.device), buffers_restored(self.module):
            with self.settings.autocast():
                outputs = named_outputs(self._wrapped(*arguments), inputs.data.info.task.outputs)
            sums = (output.abs().sum() for output in outputs.values() if output.requires_grad)
            backward(0 * sum(sums, start=torch.zeros((), device=self.settings.device)))
        self.module.zero_grad()

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        self._ranges.takes_part = counts = len(batch) > 0
        # Restored after the backward pass only: autograd refuses tensors that were modified since the forward pass.
        with buffers_restored(self.module, only_if=not counts), self._synchronized(last):
            with self.times.part("forward"):
                with self.settings.autocast():
                    returned = self._wrapped(*batch.args)
                loss = objective(returned, batch)
            with self.times.backward():
                # DistributedDataParallel averages over ranks, but contributions to the mean must be summed.
                backward(scaler.scale(loss * self.workers.size))
        self._buffers.pass_done()
        return loss.detach()

    def _synchronized(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._wrapped.no_sync()

    def consolidate(self) -> None:
        self._buffers.synchronize()

    def metrics(self) -> dict[str, JSON]:
        return {"comm": self.comm}


def _gradient_memory(module: nn.Module, inputs: TrainingInputs) -> SharedMemory | None:
    """Return shared memory for the gradients of workers on one machine's CPUs; None where it can't be used."""
    options = inputs.options
    if options.comm not in (None, "auto") or options.compress not in (None, "none"):
        return None
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if inputs.settings.device.type != "cpu" or any(parameter.dtype != torch.float32 for parameter in trained):
        return None
    return share_memory(inputs.workers, max(2, sum(parameter.numel() for parameter in trained)))


# torch 2.13 renamed the option that broadcasts buffers at each step, and warns of the old name.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_WITHOUT_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


def _distributed(module: nn.Module, settings: DeviceSettings, options: Parallel) -> DistributedDataParallel:
    return DistributedDataParallel(
        module,
        device_ids=[settings.device.index] if settings.device.type == "cuda" else None,
        **_WITHOUT_BUFFERS,
        init_sync=False,  # every rank has read the same model
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view is not False,
        static_graph=bool(options.static_graph),
        find_unused_parameters=bool(options.find_unused),
    )
