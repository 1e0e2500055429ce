"""Base class of the parallel strategies, and what all of them are built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptpipe import JSON, Context
from ptpipe_torch import Batch, Data, Model, Task
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_train.config_parallel import Parallel
from ptpipe_train.device import DeviceSettings, first_batch
from ptpipe_train.distillation import DistillationLoss
from ptpipe_train.losses import float_outputs
from ptpipe_train.parallel.batch_shard import BatchShard
from ptpipe_train.step_times import StepTimes


@dataclass(frozen=True)
class TrainingInputs:
    """What is trained, on which data, where, and by which workers."""

    ctx: Context
    model: Model
    module: nn.Module
    """The model, built, on the CPU, in training mode."""
    data: Data
    batch_size: int
    """Summed over all workers."""
    settings: DeviceSettings
    options: Parallel
    workers: WorkerGroup
    compile: bool = False
    """Whether forward and backward pass are compiled."""
    cuda_graphs: bool = False
    """Whether passes are captured as CUDA graphs, where the network allows that: by one process, on a CUDA device."""
    has_teacher: bool = False
    """Whether losses are computed from the network's inputs too."""

    def first_inputs(self, num_samples: int) -> tuple[torch.Tensor, ...]:
        """Return the network's inputs for samples of train, on the device and in the memory format."""
        return first_batch(self.data, self.settings, num_samples).args


@dataclass(frozen=True)
class Objective:
    """The loss of an optimizer step: the mean of the task's losses over all samples of the step."""

    num_samples: int
    """Samples of the whole step: all batches, all workers."""
    task: Task
    distillation: DistillationLoss | None = None

    def __call__(self, returned: Any, batch: Batch) -> torch.Tensor:
        """Return a batch's contribution to the mean, a scalar; contributions add up to the loss of the step.

        `returned`: by the network. A mixed sample's loss is the weighted mean of those with its own targets and with
        its partner's; a teacher sees the mixed sample. Raises StageError where the network did not return what its
        signature says.
        """
        outputs = float_outputs(returned, self.task.outputs)
        losses_B = self.task.losses(outputs, batch.targets)
        if batch.partners is not None:
            weights_B = batch.partners.weights_B
            losses_B = weights_B * losses_B + (1 - weights_B) * self.task.losses(outputs, batch.partners.targets)
        if self.distillation:
            losses_B = self.distillation(losses_B, outputs, batch)
        return losses_B[: len(batch)].sum() / self.num_samples


class ParallelStrategy(ABC):
    """How forward and backward passes are distributed over devices. This base is for a single worker."""

    workers: WorkerGroup = SINGLE_WORKER
    batch_shard: BatchShard = BatchShard()
    needs_inputs = True
    """Whether this worker reads inputs, or targets alone."""
    comm = ""
    """How gradients are summed, where there is a choice: the order of a sum decides its last bits."""
    state_is_replicated = True
    """Whether parameters and optimizer state are the same on every rank, so that one copy of them is enough."""

    def __init__(self, module: nn.Module, settings: DeviceSettings) -> None:
        self.module = module
        """The whole network, as it is evaluated and delivered; up to date after `consolidate`."""
        self.trained = module
        """The part of it that this worker trains."""
        self.settings = settings
        self.times = StepTimes(settings.device)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this worker trains, with their names in the whole network."""
        return self.trained.named_parameters()

    @abstractmethod
    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        """Accumulate a batch's gradients, and return this rank's contribution to the step's loss, a detached scalar.

        `last`: whether it is the last batch of the step, after which gradients must be those of all ranks.
        """

    def pass_size(self, batch_size: int) -> int:
        """Return how many samples of a batch this worker's forward passes have at most."""
        return self.batch_shard.size(batch_size)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the scaler of fp16 losses and gradients."""
        return self.settings.grad_scaler()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Clip the norm of all gradients of the network together to `max_norm`."""
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def consolidate(self) -> None:  # noqa: B027  # nothing to do where each worker has the whole network
        """Bring `module` up to date. Every rank must call it."""

    def metrics(self) -> dict[str, JSON]:
        """Return metrics of the stage that only this strategy has."""
        return {}
