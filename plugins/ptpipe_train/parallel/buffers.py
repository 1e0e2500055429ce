"""What a network keeps beside its parameters, brought together over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import nn

from ptpipe_torch import RangeObserver
from ptpipe_torch.distributed.shared_memory import SharedMemory
from ptpipe_torch.distributed.worker_group import WorkerGroup, group_device


class RangeUnion:
    """Lets reporters and fake quantization see the range of the whole batch, over the ranks of a group.

    So they have the very state that the whole batch gives in one process, and every rank rounds to the same grid.
    """

    def __init__(
        self, module: nn.Module, workers: WorkerGroup, group: Any = None, memory: SharedMemory | None = None
    ) -> None:
        """Until the team's work ends. `memory`, of two values or more, is taken where there is one, else messages."""
        self._group, self._memory = group, memory
        self.takes_part = True
        """False for a rank that has no sample that counts."""
        self._holders = [layer for layer in module.modules() if isinstance(layer, RangeObserver)]
        for layer in self._holders:
            layer.all_reduce_range = self._unite
        workers.exit_stack.callback(self._let_go)

    def _let_go(self) -> None:
        for layer in self._holders:
            layer.all_reduce_range = None

    def _unite(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([low, -high])
        if not self.takes_part:
            both.fill_(torch.inf)
        if self._memory:
            self._memory.reduce([both], "min")
        else:
            dist.all_reduce(both, dist.ReduceOp.MIN, group=self._group)
        if not self.takes_part and both[0] > -both[1]:  # nobody does
            return low, high
        return both[0], -both[1]


class SharedBuffers:
    """The buffers of copies of a network: statistics of batch norms are averaged, all others are those of rank 0."""

    def __init__(self, module: nn.Module, group: Any = None) -> None:
        self._module = module
        layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [
            statistic
            for layer in layers
            if layer.running_mean is not None
            for statistic in (layer.running_mean, layer.running_var)
        ]
        self._group = group

    def unite(self) -> None:
        """Make them the same. Every rank must call it."""
        if self._statistics:
            self._average()
        # Not their state dict, in which a float may be no tensor; not their values alone, for ranges change shape.
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
    """Give every rank of the group what the one of that global rank has."""
    device = group_device(group)
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=group)
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    if dist.get_rank() != source:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return bytes(data.cpu().numpy().tobytes())
