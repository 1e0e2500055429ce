"""What a network may ask of whoever trains or calibrates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class TrainingCallback(Protocol):
    """A module that wants to know how far its training is (fake quantization that freezes its reporters).

    A trainer calls `on_progress` on every such submodule before each optimizer step's first forward pass,
    and must keep nothing else of it: what the module changes on itself is part of its state dict.
    """

    def on_progress(self, fraction: float) -> None:
        """`fraction` runs from 0.0 at the start to just below 1.0 at the last step."""
        ...


RangeReducer: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"


@runtime_checkable
class RangeObserver(Protocol):
    """A module that watches the range of what goes through it (an observer, fake quantization).

    Where several processes share a batch, the trainer sets `all_reduce_range`. The module must then call it with
    the least and the greatest value that it saw of each batch (float32, shape ()), once a forward pass in which it
    watches, and use what it gets in their place: those of all processes.
    """

    all_reduce_range: RangeReducer | None
