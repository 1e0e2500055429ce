"""How far a training has come, and its best epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import JSON

if TYPE_CHECKING:
    from ptpipe_train.config import EarlyStopping


@dataclass
class TrainingProgress:
    """Counters and metrics of a training up to the present step. All of it is JSON, for checkpoints."""

    epoch: int = 0
    """Completed epochs, evaluation on val included."""
    step: int = 0
    """Completed optimizer steps of the present epoch."""
    loss_sum: float = 0.0
    """Summed over the samples of the present epoch."""
    train_s: float = 0.0
    """Seconds spent in steps, including those before an interruption."""
    num_samples: int = 0
    """Samples trained on in these seconds."""
    history: list[dict[str, JSON]] = field(default_factory=list)
    """Metrics of each completed epoch."""
    restarts: list[int] = field(default_factory=list)
    """The steps that were completed when the training resumed from a checkpoint."""

    def finish_epoch(self, metrics: Mapping[str, JSON]) -> None:
        """Append the epoch's metrics to the history and begin the next epoch."""
        self.history.append(dict(metrics))
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, 0.0


@dataclass
class Best:
    """The best epoch so far by a metric of val, with the network's state at its end."""

    rule: EarlyStopping
    higher_is_better: bool = False
    value: float = math.inf
    """The metric, negated where higher is better."""
    epochs_since: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """A copy of the state dict of the best epoch."""

    def update(self, metrics: Mapping[str, float], module: nn.Module) -> None:
        """Compare an epoch's metrics with the best so far, and copy the network's state where they are better."""
        value = metrics[self.rule.metric] * (-1 if self.higher_is_better else 1)
        if value < self.value - self.rule.min_delta:
            self.value, self.epochs_since = value, 0
            self.tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        else:
            self.epochs_since += 1

    @property
    def is_over(self) -> bool:
        """Whether `patience` is exhausted."""
        return self.epochs_since >= self.rule.patience

    def state(self) -> dict[str, Any]:
        """Return everything but the tensors, as JSON."""
        return {"value": self.value if self.tensors else None, "epochs_since": self.epochs_since}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state` and `tensors`."""
        self.value = math.inf if state["value"] is None else state["value"]
        self.epochs_since, self.tensors = state["epochs_since"], dict(tensors)
