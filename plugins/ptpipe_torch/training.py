"""What a network may ask of whoever trains or calibrates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class TrainingListener(Protocol):
    """A module that wants to know how far its training is (fake quantization that freezes its observers).

    A trainer calls `training_progress` on every such submodule before each optimizer step's first forward pass,
    and must keep nothing else of it: what the module changes on itself is part of its state dict.
    """

    def training_progress(self, share_done: float) -> None:
        """`share_done` runs from 0.0 at the start to just below 1.0 at the last step."""
        ...


@runtime_checkable
class RangeHolder(Protocol):
    """A module that watches the range of what goes through it (an observer, fake quantization).

    Whoever trains or calibrates with several processes unites what each saw of a batch, after each batch.
    """

    @property
    def watches_ranges(self) -> bool:
        """Whether the last forward pass changed the range; the same on every rank."""
        ...

    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest value, float32, of one shape; inf and -inf where nothing was seen."""
        ...

    def set_ranges(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Replace them."""
        ...
