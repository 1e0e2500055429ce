"""Where a training stands, and which epoch was the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import JSON

if TYPE_CHECKING:
    from ptpipe_train import EarlyStopping


@dataclass
class Progress:
    """How far a training is, and its figures so far. All of it is JSON."""

    epoch: int = 0
    """Epochs that are over; val included."""
    step: int = 0
    """Steps done of the present epoch."""
    loss_sum: float = 0.0
    """Of the samples of the present epoch."""
    train_s: float = 0.0
    """Seconds spent in steps, those of runs that were killed included."""
    num_images: int = 0
    """Images trained on in these seconds."""
    history: list[dict[str, JSON]] = field(default_factory=list)
    """Figures of each epoch that is over."""

    def finish_epoch(self, figures: Mapping[str, JSON]) -> None:
        """Go on to the next epoch."""
        self.history.append(dict(figures))
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, 0.0


@dataclass
class Best:
    """The best epoch so far by a figure of val, with the network's state then."""

    rule: EarlyStopping
    value: float = math.inf
    """The figure, negated where more is better."""
    epochs_since: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def see(self, figures: Mapping[str, float], module: nn.Module) -> None:
        """Take notice of an epoch's figures."""
        value = -figures["val_top1"] if self.rule.metric == "val_top1" else figures[self.rule.metric]
        if value < self.value - self.rule.min_delta:
            self.value, self.epochs_since = value, 0
            self.tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        else:
            self.epochs_since += 1

    @property
    def is_over(self) -> bool:
        """Whether patience is at its end."""
        return self.epochs_since >= self.rule.patience

    def facts(self) -> dict[str, Any]:
        """All but the tensors, as JSON."""
        return {"value": self.value if self.tensors else None, "epochs_since": self.epochs_since}

    def load(self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `facts` and `tensors`."""
        self.value = math.inf if facts["value"] is None else facts["value"]
        self.epochs_since, self.tensors = facts["epochs_since"], dict(tensors)
