"""What tasks have in common whose targets are numbers of classes. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from ptpipe import JSON
from ptpipe_torch.model.signature import Meanings
from ptpipe_torch.task.constants import constant
from ptpipe_torch.task.task import Task, meaning_of

if TYPE_CHECKING:
    import torch


class SmoothedTask(Task):
    """A task whose loss is a cross-entropy, of labels that can be smoothed."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each label that the loss spreads over all classes (Szegedy et al., 2015, section 7)."""

    def with_label_smoothing(self, label_smoothing: float) -> Self:
        return self.model_copy(update={"label_smoothing": label_smoothing})


class ClassTask(SmoothedTask):
    """A task of named classes, K of them."""

    class_names: tuple[str, ...] = Field(min_length=1)
    """By class, in the order of their numbers."""
    class_weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Of each class in the loss; empty: 1. The mean is over targets, not weights.

    The loss of a target is multiplied by its class's; with smoothing, the fraction that each class has of the label by
    that class's own, as `torch.nn.CrossEntropyLoss` does.
    """

    @model_validator(mode="after")
    def _has_a_weight_for_each_class(self) -> Self:
        if self.class_weights and len(self.class_weights) != self.num_classes:
            raise ValueError("class_weights has a number for each class")
        return self

    @property
    def meanings(self) -> Meanings:
        return {name: meaning_of(self.class_names) for name in self.class_scores}

    def summary(self) -> dict[str, JSON]:
        names = meaning_of(self.class_names)
        return {"num_classes": self.num_classes} | ({"class_names": list(names)} if names else {})

    def _weights(self, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the weights for torch's cross-entropy, (K,), float32 unless `dtype` says otherwise; None: all 1."""
        return constant(self.class_weights, device, dtype) if self.class_weights else None

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)
