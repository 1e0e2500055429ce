"""Evaluation on val between two epochs, and restoring what a forward pass changes.

Shape legend: N samples of a batch, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ptpipe_torch import Data
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_torch.model.outputs import named_outputs
from ptpipe_train.device import DeviceSettings


class Score(NamedTuple):
    """Metrics of a split."""

    loss: float
    """Mean cross-entropy, without label smoothing."""
    top1: float
    """Fraction of samples whose most likely class is the label."""


def evaluate(
    module: nn.Module,
    data: Data,
    split: str,
    settings: DeviceSettings,
    batch_size: int,
    workers: WorkerGroup = SINGLE_WORKER,
) -> Score:
    """Evaluate the network in eval mode and float32, as it will be delivered, whatever precision it is trained in.

    Each rank takes its slice of the samples, every sample is counted once, and all ranks return the same score.
    Buffers and modes of the network are restored.
    """
    order_N = np.arange(len(data.splits[split]))[workers.rank_slice(len(data.splits[split]))]
    # Summed on the device, so no batch waits for a number; in float64, so the order of summation doesn't show.
    loss_sum = torch.zeros((), dtype=torch.float64, device=settings.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=settings.device)
    batches = data.batches(
        split,
        order_N=order_N,
        batch_size=batch_size,
        channels_last=settings.channels_last,
        device=settings.device,
    )
    with state_restored(module), torch.no_grad():
        for batch in batches:
            (logits_NK,) = named_outputs(module(*batch.args), data.info.signature.outputs).values()
            labels_N = batch.targets["labels"]
            loss_sum += cross_entropy(logits_NK, labels_N, reduction="sum")
            num_correct += (logits_NK.argmax(1) == labels_N).sum()
    loss, correct, num_samples = workers.all_reduce([loss_sum.item(), num_correct.item(), len(order_N)])
    return Score(loss / num_samples, correct / num_samples)


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
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()] if only_if else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.resize_(value.shape).copy_(value)
