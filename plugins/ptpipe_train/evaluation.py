"""Evaluation on val between two epochs, and restoring what a forward pass changes.

Shape legend: N samples of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ptpipe_torch import Data
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_torch.model.outputs import named_outputs
from ptpipe_torch.task.ranking import with_ranking
from ptpipe_torch.task.task import exact_sums
from ptpipe_train.device import DeviceSettings


def evaluate(
    module: nn.Module,
    data: Data,
    split: str,
    settings: DeviceSettings,
    batch_size: int,
    workers: WorkerGroup = SINGLE_WORKER,
) -> tuple[dict[str, float], list[str]]:
    """Return the task's metrics on a split, in eval mode and float32, as the network will be delivered.

    Behind them, what is undefined there, in sentences: `Task.undefined`.

    Each rank takes its slice of the samples, every sample is counted once, and all ranks return the same metrics.
    Buffers and modes of the network are restored.
    """
    task, num_samples = data.info.task, len(data.splits[split])
    own_N = np.arange(num_samples)[workers.rank_slice(num_samples)]
    # A rank without samples evaluates one, which it does not count: it must know the shapes of the sums.
    batches = data.batches(
        split,
        order_N=own_N if len(own_N) else np.zeros(1, dtype=np.int64),
        batch_size=batch_size,
        channels_last=settings.channels_last,
        device=settings.device,
    )
    totals: dict[str, torch.Tensor] = {}  # on the device, so no batch waits for a number
    ranked: list[torch.Tensor] = []
    with state_restored(module), torch.no_grad():
        for batch in batches:
            outputs = named_outputs(module(*batch.args), task.outputs)
            sums = exact_sums(task, outputs, batch.targets)
            totals = {name: totals[name] + value if totals else value for name, value in sums.items()}
            if (rows := task.label_scores(outputs, batch.targets)) is not None:
                ranked.append(rows)
    if not len(own_N):
        totals = {name: torch.zeros_like(total) for name, total in totals.items()}
    figures = task.figures(_all_reduced(totals, workers), num_samples)
    figures = with_ranking(task, figures, _all_gathered(ranked, num_samples, workers))
    metrics = {metric.name: float(cast("float", figures[metric.name])) for metric in task.metrics}
    return metrics, task.undefined(figures, split)


def _all_reduced(totals: Mapping[str, torch.Tensor], workers: WorkerGroup) -> dict[str, npt.NDArray[np.float64]]:
    arrays = {name: total.cpu().numpy().astype(np.float64) for name, total in totals.items()}
    flat = workers.all_reduce(np.concatenate([array.ravel() for array in arrays.values()]).tolist())
    ends = np.cumsum([array.size for array in arrays.values()])
    parts = np.split(np.array(flat), ends[:-1])
    return {name: part.reshape(arrays[name].shape) for name, part in zip(arrays, parts, strict=True)}


def _all_gathered(
    batches: Sequence[torch.Tensor], num_samples: int, workers: WorkerGroup
) -> npt.NDArray[np.float32] | None:
    """Return the rows of all samples, rank by rank; None where a task has none."""
    if not batches:
        return None
    own = torch.cat([rows.cpu() for rows in batches])  # the device has no room for a second copy
    sizes = [
        len(range(num_samples)[replace(workers, rank=rank).rank_slice(num_samples)]) for rank in range(workers.size)
    ]
    padded = own.new_zeros(max(sizes), *own.shape[1:])  # all ranks must gather as many
    padded[: sizes[workers.rank]] = own[: sizes[workers.rank]]
    gathered = workers.all_gather_tensor(padded)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)]).numpy()


@contextmanager
def state_restored(module: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Put the network in eval (or training) mode inside the `with`, then restore each layer's mode and all buffers.

    Layer by layer, because some may be frozen; buffers too, because torch.ao's observers also observe in eval mode.
    """
    modes = [(layer, layer.training) for layer in module.modules()]
    with buffers_restored(module):
        module.train(training)
        try:
            yield
        finally:
            for layer, mode in modes:
                layer.training = mode


@contextmanager
def buffers_restored(module: nn.Module, *, only_if: bool = True) -> Iterator[None]:
    """Restore all buffers after the `with`; do nothing unless `only_if`."""
    layers = module.modules() if only_if else ()
    before = [
        (layer, name, buffer, None if buffer is None else buffer.detach().clone())
        for layer in layers
        for name, buffer in layer._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, name, buffer, value in before:
                layer._buffers[name] = buffer  # a pass may assign another tensor
                if buffer is not None and value is not None:
                    buffer.resize_(value.shape).copy_(value)
