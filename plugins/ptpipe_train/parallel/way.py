"""What every way of training in parallel has in common.

Shape legend: N images of a batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ptpipe import JSON
from ptpipe_torch import Batch
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_train.parallel.share import Share
from ptpipe_train.settings import Settings
from ptpipe_train.step_times import StepTimes


@dataclass(frozen=True)
class Objective:
    """What a step makes smaller: cross-entropy, averaged over all samples of the step."""

    num_samples: int
    """Of the whole step: all batches, all workers."""
    label_smoothing: float

    def __call__(self, logits_NK: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """These samples' part of the mean; the parts of a step add up to it."""
        loss: torch.Tensor = cross_entropy(
            logits_NK.float(), labels_N, reduction="sum", label_smoothing=self.label_smoothing
        )
        return loss / self.num_samples


class Way(ABC):
    """How a network is trained on several devices. This base is one process alone, which talks to nobody."""

    workers: WorkerGroup = SINGLE_WORKER
    share: Share = Share()
    needs_images = True
    """Whether this process looks at images, or at their labels alone."""
    comm = ""
    """What brings gradients together, where there is a choice: the last bits of a sum follow from its order."""
    state_is_shared = True
    """Whether parameters and optimizer are the same on every rank, so that one copy of them is enough."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.module = module
        """The whole network, as it is measured and delivered; up to date after `gather`."""
        self.trained = module
        """What this process trains of it."""
        self.settings = settings
        self.times = StepTimes(settings.device)

    @abstractmethod
    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        """Add a batch's part to the gradients, and return this rank's part of the step's loss.

        `last`: whether it is the step's last batch, after which gradients must be those of all ranks.
        """

    def scaler(self) -> torch.amp.GradScaler:
        """Keep fp16 gradients in range."""
        return self.settings.scaler()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Scale all gradients of the network down to that norm together."""
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def gather(self) -> None:  # noqa: B027  # nothing to do where the network is whole
        """Bring `module` up to date. Every rank must call it."""

    def facts(self) -> dict[str, JSON]:
        """What there is to record of it."""
        return {}
