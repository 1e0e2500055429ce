"""Measuring a network on val between two epochs, without leaving a trace in it.

Shape legend: N images of a batch, C channels, H height, W width, K classes.
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
from ptpipe_train.settings import Settings


class Score(NamedTuple):
    """Figures of a split."""

    loss: float
    """Mean cross-entropy, without label smoothing."""
    top1: float


def evaluate(
    module: nn.Module, data: Data, split: str, settings: Settings, batch_size: int, workers: WorkerGroup = SINGLE_WORKER
) -> Score:
    """Measure the network in eval mode, in float32, as it will be delivered, whatever it is trained in.

    The ranks of a team each take their share of the samples, and every one is counted once; all get the same figures.
    """
    order_N = np.arange(len(data.splits[split]))[workers.rank_slice(len(data.splits[split]))]
    # On the device until the end, and in float64: the order of a sum of many small numbers must not show.
    loss_sum = torch.zeros((), dtype=torch.float64, device=settings.device)
    num_right = torch.zeros((), dtype=torch.int64, device=settings.device)
    batches = data.batches(
        split,
        order_N=order_N,
        batch_size=batch_size,
        channels_last=settings.channels_last,
        device=settings.device,
    )
    with left_as_it_was(module), torch.no_grad():
        for batch in batches:
            logits_NK = module(batch.images_NCHW)
            loss_sum += cross_entropy(logits_NK, batch.labels_N, reduction="sum")
            num_right += (logits_NK.argmax(1) == batch.labels_N).sum()
    loss, right, num_samples = workers.all_reduce([loss_sum.item(), num_right.item(), len(order_N)])
    return Score(loss / num_samples, right / num_samples)


@contextmanager
def left_as_it_was(module: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Put the network in eval (or training) mode inside the `with`, then put back each layer's mode and all buffers.

    Layers may be frozen one by one, and torch.ao's reporters also count what they see in eval mode.
    """
    modes = [(layer, layer.training) for layer in module.modules()]
    with buffers_kept(module):
        module.train(training)
        try:
            yield
        finally:
            for layer, mode in modes:
                layer.training = mode


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
