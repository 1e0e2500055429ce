"""Protocols that a submodule may implement to hear from the stage that trains or calibrates it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class TrainingCallback(Protocol):
    """A module that follows the progress of its training (fake quantization that freezes its observers).

    A trainer calls `on_progress` on every such submodule before the first forward pass of each optimizer step. Whatever
    the module changes in response must be part of its state dict, or a resumed training would differ.
    """

    def on_progress(self, fraction: float) -> None:
        """`fraction`: of the training that is done, from 0.0 at the first step to just below 1.0 at the last."""
        ...


@runtime_checkable
class Freezing(Protocol):
    """A module that no longer adapts once this fraction of the training is done (batch norm and ranges in QAT).

    What it has by then must fit the weights of the last step, so a trainer's default is a learning rate that decays.
    """

    freeze_at: float


@runtime_checkable
class Undecayed(Protocol):
    """A module with parameters for which zero is no simpler value than others (learned ranges in QAT)."""

    undecayed: Collection[str]
    """Names of its own parameters that a trainer must leave out of weight decay."""


RangeReducer: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"


@runtime_checkable
class RangeObserver(Protocol):
    """A module that observes the range of the tensors that pass through it (an observer, fake quantization).

    Where several processes share a batch, the trainer sets `all_reduce_range`. In each forward pass in which it
    observes, the module must then call it once with the minimum and maximum of its part of the batch (float32, shape
    ()), and use the returned minimum and maximum over all processes instead.
    """

    all_reduce_range: RangeReducer | None
