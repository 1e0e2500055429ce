"""Synchronization of buffers over ranks: ranges of observers, batch norm statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import nn

from ptpipe_torch import RangeObserver
from ptpipe_torch.distributed.shared_memory import SharedMemory
from ptpipe_torch.distributed.worker_group import WorkerGroup, group_device


class RangeSync:
    """All-reduces the ranges that observers and fake quantization see, over the ranks of a process group.

    Each forward pass then uses the range of the whole batch, as a single process would, and every rank rounds to the
    same grid.
    """

    def __init__(
        self, module: nn.Module, workers: WorkerGroup, group: Any = None, memory: SharedMemory | None = None
    ) -> None:
        """Install into the module's observers until `workers.exit_stack` closes.

        `group`: process group, default the whole one; `memory`: used instead of it, with a slot of at least 2 values.
        """
        self._group, self._memory = group, memory
        self.takes_part = True
        """False on a rank whose batch is padding only."""
        self._observers = [layer for layer in module.modules() if isinstance(layer, RangeObserver)]
        for layer in self._observers:
            layer.all_reduce_range = self._all_reduce
        # Traced networks may outlive the stage; their observers must not keep the group and its memory alive.
        workers.exit_stack.callback(self._uninstall)

    def _uninstall(self) -> None:
        for layer in self._observers:
            layer.all_reduce_range = None

    def _all_reduce(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([low, -high])  # one MIN for both ends
        if not self.takes_part:
            both.fill_(torch.inf)
        if self._memory:
            self._memory.reduce([both], "min")
        else:
            dist.all_reduce(both, dist.ReduceOp.MIN, group=self._group)
        if not self.takes_part and both[0] > -both[1]:  # no rank takes part
            return low, high
        return both[0], -both[1]


class BufferSync:
    """Synchronizes the buffers of replicas: batch norm statistics are averaged, all others are those of rank 0."""

    def __init__(self, module: nn.Module, group: Any = None) -> None:
        """`group`: process group of the replicas, default the whole one."""
        self._module = module
        # Not those of frozen layers: an average of equal values is not always equal to them.
        layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [
            statistic
            for layer in layers
            for statistic in (layer.running_mean, layer.running_var)
            if layer.training and statistic is not None
        ]
        self._group = group

    def synchronize(self) -> None:
        """Make the buffers equal on all ranks. Every rank must call it."""
        if self._statistics:
            self._average()
        # Buffers, not the state dict, whose values may be no tensors; with their shapes, since those of ranges change.
        buffers = {name: buffer.contiguous() for name, buffer in self._module.named_buffers()}
        if not buffers:
            return
        first = load(broadcast_bytes(save(buffers), dist.get_process_group_ranks(self._group)[0], self._group))
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.resize_(first[name].shape).copy_(first[name])

    def _average(self) -> None:
        flat = torch.cat([statistic.reshape(-1) for statistic in self._statistics])
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)
        start = 0
        for statistic in self._statistics:
            statistic.copy_(flat[start : start + statistic.numel()].view_as(statistic))
            start += statistic.numel()


def broadcast_bytes(content: bytes, source: int, group: Any = None) -> bytes:
    """Return the content of the rank `source` (its global rank) on every rank of the group."""
    device = group_device(group)
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=group)
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    if dist.get_rank() != source:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return bytes(data.cpu().numpy().tobytes())
