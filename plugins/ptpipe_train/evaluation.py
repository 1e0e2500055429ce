"""Measuring a network on val between two epochs, without leaving a trace in it.

Shape legend: N images of a batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ptpipe_torch import Data
from ptpipe_train.settings import Settings


class Score(NamedTuple):
    """Figures of a split."""

    loss: float
    """Mean cross-entropy, without label smoothing."""
    top1: float


def evaluate(module: nn.Module, data: Data, split: str, settings: Settings, batch_size: int) -> Score:
    """Measure the network in eval mode, in float32, as it will be delivered, whatever it is trained in."""
    num_samples = len(data.splits[split])
    # On the device until the end, and in float64: the order of a sum of many small numbers must not show.
    loss_sum = torch.zeros((), dtype=torch.float64, device=settings.device)
    num_right = torch.zeros((), dtype=torch.int64, device=settings.device)
    batches = data.batches(split, batch_size=batch_size, channels_last=settings.channels_last, device=settings.device)
    with _left_as_it_was(module), torch.no_grad():
        for batch in batches:
            logits_NK = module(batch.images_NCHW)
            loss_sum += cross_entropy(logits_NK, batch.labels_N, reduction="sum")
            num_right += (logits_NK.argmax(1) == batch.labels_N).sum()
    return Score(loss_sum.item() / num_samples, num_right.item() / num_samples)


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Put the network in eval mode inside the `with`, then put back each layer's mode and all buffers.

    Layers may be frozen one by one, and torch.ao's observers also count what they see in eval mode.
    """
    training = [(layer, layer.training) for layer in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in training:
            layer.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.resize_(before.shape).copy_(before)
