"""Synchronization of buffers over ranks: ranges of observers, batch norm statistics, and what else passes write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import nn

from ptpipe_torch import RangeObserver
from ptpipe_torch.distributed.shared_memory import SharedMemory
from ptpipe_torch.distributed.worker_group import WorkerGroup, group_device
from ptpipe_torch.int8.observers import is_observer
from ptpipe_torch.python_file import seeded_everywhere
from ptpipe_train.parallel.strategy import TrainingInputs

_NUM_TRIAL_SAMPLES = 2
_MAX_NAMED = 3
_DEPENDS = 2
"""Marks, among the numbers that ranks exchange, a buffer whose values depend on the samples; 1: it is written."""


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

    def __init__(self, module: nn.Module, group: Any = None, written: Collection[str] = ()) -> None:
        """`group`: process group of the replicas, default the whole one. `written`: see `find_written`."""
        self._module = module
        # Not those of frozen layers: an average of equal values is not always equal to them.
        layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [
            statistic
            for layer in layers
            for statistic in (layer.running_mean, layer.running_var)
            if layer.training and statistic is not None
        ]
        self._group, self._written = group, written

    def pass_done(self) -> None:
        """Make what a pass has written equal on all ranks. Every rank must call it after each backward pass.

        Not before the next forward pass, as DistributedDataParallel does: a checkpoint between them has equal buffers.
        """
        if self._written:
            self._share({name: buffer for name, buffer in self._module.named_buffers() if name in self._written})

    def synchronize(self) -> None:
        """Make the buffers equal on all ranks. Every rank must call it."""
        if self._statistics:
            self._average()
        # Buffers, not the state dict, whose values may be no tensors; with their shapes, since those of ranges change.
        if buffers := dict(self._module.named_buffers()):
            self._share(buffers)

    def _share(self, buffers: Mapping[str, torch.Tensor]) -> None:
        content = save({name: buffer.detach().contiguous() for name, buffer in buffers.items()})
        first = load(broadcast_bytes(content, dist.get_process_group_ranks(self._group)[0], self._group))
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.resize_(first[name].shape).copy_(first[name])

    def _average(self) -> None:
        flat = torch.cat([statistic.reshape(-1) for statistic in self._statistics])
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)
        start = 0
        for statistic in self._statistics:
            statistic.copy_(flat[start : start + statistic.numel()].view_as(statistic))
            start += statistic.numel()


def find_written(inputs: TrainingInputs) -> frozenset[str]:
    """Return the buffers that a forward pass in training mode writes, but those of batch norms and of observers.

    Such as a codebook's moving averages, or a queue of samples: each rank would write what its own shard gives. Found
    by passes on other builds of the network, and only where there are such buffers; the same on every rank. Gives a
    notice where what is written depends on the samples.
    """
    candidates = sorted(_other_buffers(inputs.module))
    if not candidates:
        return frozenset()
    first, last = (
        _written_by(inputs, [x[[row, row]] for x in inputs.first_inputs(_NUM_TRIAL_SAMPLES)]) for row in (0, -1)
    )
    own = [(name in first) + (name in first and not _is_same(first[name], last.get(name))) for name in candidates]
    found = dict(zip(candidates, map(max, zip(*inputs.workers.all_gather(own), strict=True)), strict=True))
    if names := [name for name, of_ranks in found.items() if of_ranks == _DEPENDS]:
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        inputs.ctx.notice(
            f"the forward pass writes buffers ({', '.join(names[:_MAX_NAMED])}{more}): all workers take those of "
            "worker 0, which sees its shard of each batch alone, so the result is not that of a single process"
        )
    return frozenset(name for name, of_ranks in found.items() if of_ranks)


def _written_by(inputs: TrainingInputs, samples: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    trial = inputs.settings.place(inputs.model.build_prepared().train())
    with inputs.settings.autocast():
        return written_buffers(trial, samples)


def written_buffers(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the buffers that a forward pass changes or replaces, with their new values; none where the pass fails."""
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    try:
        with seeded_everywhere(0, inputs[0].device), torch.no_grad():
            module(*inputs)
    except Exception:  # noqa: BLE001  # the training reports it
        return {}
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in before and (buffer is not before[name][0] or buffer._version != before[name][1])
    }


def _is_same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _other_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that belong neither to batch norms nor to observers and fake quantization."""
    kinds = (nn.modules.batchnorm._BatchNorm, RangeObserver)
    owners = (layer for layer in module.modules() if isinstance(layer, kinds) or is_observer(layer))
    owned = {id(buffer) for layer in owners for buffer in layer.buffers()}
    return {name for name, buffer in module.named_buffers() if id(buffer) not in owned}


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
