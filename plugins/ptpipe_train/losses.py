"""Losses collected on the device and read now and then, so that no step waits for a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class StepLoss(NamedTuple):
    """The loss of one optimizer step."""

    step: int
    """Counts from 0, over all epochs."""
    num_samples: int
    loss: float
    """Mean over the samples."""


class PendingLosses:
    """Losses that were computed and not yet looked at."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, step: int, num_samples: int, loss: torch.Tensor) -> None:
        """Keep a step's loss, a detached tensor of shape ()."""
        self._steps.append((step, num_samples))
        self._tensors.append(loss)

    def __len__(self) -> int:
        return len(self._steps)

    def take(self, total: Callable[[list[float]], list[float]] = list) -> list[StepLoss]:
        """Wait for all losses since the last time and return them, in their order.

        `total` makes the steps' losses of the parts that several workers have.
        """
        losses = total(torch.stack(self._tensors).tolist() if self._tensors else [])
        taken = [StepLoss(step, num, loss) for (step, num), loss in zip(self._steps, losses, strict=True)]
        self._steps, self._tensors = [], []
        return taken
