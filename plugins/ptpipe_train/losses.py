"""Losses: their gradients; and those of steps, which stay on the device and are read a few times a second.

So no step waits for a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ptpipe import StageError
from ptpipe_torch import TensorSpec
from ptpipe_torch.model.outputs import named_outputs

_COARSE = (torch.bfloat16, torch.float16)


def float_outputs(returned: Any, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return `named_outputs`, in float32 where autocast computed them in bf16 or fp16.

    The loss of a plugin's task would be as coarse.
    """
    named = named_outputs(returned, specs)
    return {name: output.float() if output.dtype in _COARSE else output for name, output in named.items()}


def backward(loss: torch.Tensor) -> None:
    """Accumulate the gradients of a loss. Raises StageError where it has none."""
    if not loss.requires_grad:
        raise StageError(
            "nothing can be learned: the loss has no gradient of what is trained. detach(), .data, item(), NumPy and "
            "torch.no_grad(), in the network's forward() or in a loss of your own, lose it: compute with torch's "
            "operators alone"
        )
    torch.autograd.backward(loss)


class StepLoss(NamedTuple):
    """The loss of one optimizer step."""

    step: int
    """Counted from 0 over all epochs."""
    num_samples: int
    loss: float
    """Mean over the samples."""


class PendingLosses:
    """Losses of the steps since they were last read."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, step: int, num_samples: int, loss: torch.Tensor) -> None:
        """Add a step's loss, a detached scalar."""
        self._steps.append((step, num_samples))
        self._tensors.append(loss)

    def __len__(self) -> int:
        return len(self._steps)

    def take(self, reduce: Callable[[list[float]], list[float]] = list) -> list[StepLoss]:
        """Synchronize with the device, and return and remove all losses, in order.

        `reduce` sums this worker's contributions over all workers.
        """
        losses = reduce(torch.stack(self._tensors).tolist() if self._tensors else [])
        taken = [StepLoss(step, num, loss) for (step, num), loss in zip(self._steps, losses, strict=True)]
        self._steps, self._tensors = [], []
        return taken
