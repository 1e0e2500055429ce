"""Gradients of several ranks, brought together in one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ptpipe_torch.distributed.shared_memory import SharedMemory
from ptpipe_torch.distributed.worker_group import group_device
from ptpipe_train.local import local

if TYPE_CHECKING:
    from ptpipe_train.parallel_options import Compress

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def average_compressed(compress: Compress, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DistributedDataParallel's over all ranks, sent in that type: a communication hook.

    torch's own hook for bf16 is for NCCL alone.
    """
    gradients = bucket.buffer()
    sent = (gradients / dist.get_world_size()).to(_DTYPES[compress])
    future = dist.all_reduce(sent, async_op=True).get_future()

    def received(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        result: torch.Tensor = gradients.copy_(done.value()[0])
        return result

    return future.then(received)


class SharedAverage:
    """Averages the buckets of DistributedDataParallel through shared memory: a communication hook.

    All together, after the last gradient: on processors that are all busy computing gradients nothing is gained by
    beginning to talk before, and each time that workers wait for each other costs.
    """

    def __init__(self, memory: SharedMemory, num_workers: int) -> None:
        self._memory, self._num_workers = memory, num_workers
        self._waiting: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take in a bucket."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._waiting.append((bucket.buffer(), future))
        if bucket.is_last():
            self._memory.reduce([gradients for gradients, _ in self._waiting], "sum")
            for gradients, waiting in self._waiting:
                waiting.set_result(gradients.div_(self._num_workers))
            self._waiting.clear()
        return future


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """What this process holds of the gradients that are there."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def clip_together(parameters: Iterable[nn.Parameter], max_norm: float, group: Any = None) -> None:
    """Scale gradients down to that norm in all, where each rank of the group holds others of them."""
    gradients = _gradients_of(parameters)
    squared = nn.utils.get_total_norm(gradients).square().to(group_device(group))
    dist.all_reduce(squared, group=group)
    scale = (max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)  # as torch's clip_grads_with_norm_
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))


def sum_gradients(parameters: Iterable[nn.Parameter], group: Any, compress: Compress) -> None:
    """Replace each gradient by the sum over the ranks of the group. `compress`: the type they are sent in."""
    if dist.get_world_size(group) == 1:
        return
    gradients = _gradients_of(parameters)
    if not gradients:  # a chunk without parameters
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if compress != "none":
        flat = flat.to(_DTYPES[compress])
    dist.all_reduce(flat, group=group)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
