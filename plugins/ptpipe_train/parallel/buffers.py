"""What a network keeps beside its parameters, brought together over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ptpipe_torch import RangeHolder


class RangeUnion:
    """The ranges seen by observers and fake quantization, united over the ranks of a group.

    A moving average takes a batch's extreme m as x + c (m - x), with the same x and c on every rank: the least of
    these over ranks is that of the least m. So the state is the very one that the whole batch gives in one process.
    """

    def __init__(self, module: nn.Module, group: Any = None) -> None:
        self._holders = [layer for layer in module.modules() if isinstance(layer, RangeHolder)]
        self._group = group

    def unite(self, *, takes_part: bool = True) -> None:
        """Unite what was seen since the last time. Every rank must call it after each batch.

        `takes_part`: False for a rank that saw no sample of the batch.
        """
        holders = [holder for holder in self._holders if holder.watches_ranges]
        if not holders:
            return
        ranges = [holder.ranges() for holder in holders]
        flat = torch.cat([part for low, high in ranges for part in (low.reshape(-1), -high.reshape(-1))])
        if not takes_part:
            flat.fill_(torch.inf)
        dist.all_reduce(flat, dist.ReduceOp.MIN, group=self._group)
        start = 0
        for holder, (low, high) in zip(holders, ranges, strict=True):
            num = low.numel()
            holder.set_ranges(
                flat[start : start + num].view_as(low), -flat[start + num : start + 2 * num].view_as(high)
            )
            start += 2 * num


class BatchNormAverage:
    """The running statistics of batch norms, averaged over the ranks of a group."""

    def __init__(self, module: nn.Module, group: Any = None) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [
            statistic
            for layer in layers
            if layer.running_mean is not None
            for statistic in (layer.running_mean, layer.running_var)
        ]
        self._group = group

    def average(self) -> None:
        """Average them. Every rank must call it."""
        if not self._statistics:
            return
        flat = torch.cat([statistic.reshape(-1) for statistic in self._statistics])
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)
        start = 0
        for statistic in self._statistics:
            statistic.copy_(flat[start : start + statistic.numel()].view_as(statistic))
            start += statistic.numel()


@contextmanager
def buffers_kept(module: nn.Module, *, only_if: bool = True) -> Iterator[None]:
    """Put all buffers back as they were, if so wanted."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()] if only_if else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.resize_(value.shape).copy_(value)
