"""What a network may ask of whoever trains it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TrainingListener(Protocol):
    """A module that wants to know how far its training is (fake quantization that freezes its observers).

    A trainer calls `training_progress` on every such submodule before each optimizer step's first forward pass,
    and must keep nothing else of it: what the module changes on itself is part of its state dict.
    """

    def training_progress(self, share_done: float) -> None:
        """`share_done` runs from 0.0 at the start to just below 1.0 at the last step."""
        ...
