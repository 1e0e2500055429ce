"""Reduction and clipping of gradients over ranks, in one message each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from ptpipe_torch.distributed.shared_memory import SharedMemory
from ptpipe_torch.distributed.worker_group import group_device
from ptpipe_train.dtensor import to_local

if TYPE_CHECKING:
    from ptpipe_train.config_parallel import Compress

GradBucket: TypeAlias = Any
"""`torch.distributed.GradBucket`, which torch's stubs leave out."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def average_compressed(compress: Compress, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks, communicated as `compress`: a DDP communication hook.

    torch's own bf16 hook supports NCCL only.
    """
    gradients: torch.Tensor = bucket.buffer()
    sent = (gradients / dist.get_world_size()).to(_DTYPES[compress])
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None  # as for every asynchronous operation of a rank of the group
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: gradients.copy_(done.value()[0]))
    return future


class SharedAverage:
    """Averages gradients through shared memory: a DDP communication hook.

    All buckets at once, after the last gradient: on processors that are all busy with the backward pass, overlapping
    communication gains nothing, and each time that workers wait for each other costs.
    """

    def __init__(self, memory: SharedMemory, num_workers: int) -> None:
        self._memory, self._num_workers = memory, num_workers
        self._pending: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future of this bucket's average."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._pending.append((bucket.buffer(), future))
        if bucket.is_last():
            self._memory.reduce([gradients for gradients, _ in self._pending], "sum")
            for gradients, pending in self._pending:
                pending.set_result(gradients.div_(self._num_workers))
            self._pending.clear()
        return future


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def clip_together(parameters: Iterable[nn.Parameter], max_norm: float, group: Any = None) -> None:
    """Clip gradients to a norm of `max_norm` in total, where each rank of the group holds others of them."""
    gradients = _local_gradients(parameters)
    squared = nn.utils.get_total_norm(gradients).square().to(group_device(group))
    dist.all_reduce(squared, group=group)
    scale = (max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)  # as torch's clip_grads_with_norm_
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))


def sum_gradients(parameters: Iterable[nn.Parameter], group: Any, compress: Compress) -> None:
    """Replace each gradient by its sum over the ranks of the group. `compress`: the type that is communicated."""
    if dist.get_world_size(group) == 1:
        return
    gradients = _local_gradients(parameters)
    if not gradients:  # a pipeline stage without parameters
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if compress != "none":
        flat = flat.to(_DTYPES[compress])
    dist.all_reduce(flat, group=group)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
