"""Predict the next token of a text.

Shape legend: B samples of a batch, L tokens of the longest one, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from ptpipe import JSON
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo
from ptpipe_torch.data.tokens import LENGTH
from ptpipe_torch.model.signature import BATCH, TensorSpec
from ptpipe_torch.task.class_task import SmoothedTask
from ptpipe_torch.task.soft_targets import class_divergence
from ptpipe_torch.task.task import Metric
from ptpipe_torch.task.token_classification import (
    IGNORE,
    check_token_targets,
    fraction_of,
    mean_of_counted,
    token_losses,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_OUTPUT, _TARGET = "logits", "next_tokens"
_MAX_EXPONENT = 700.0
"""Of a perplexity, which must stay finite."""


class LanguageModeling(SmoothedTask):
    """Networks return `logits`, float32 (B, L, V); the target is `next_tokens`, int64 (B, L)."""

    vocabulary_size: int = Field(ge=2)
    length: PositiveInt | Literal["length"] = LENGTH
    """L, or its symbol."""

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {_TARGET: ArrayInfo(dtype="int64", shape=(self.length,))}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_OUTPUT, "float32", (BATCH, self.length, self.vocabulary_size)),)

    @property
    def class_scores(self) -> Mapping[str, int]:
        return {_OUTPUT: 2}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("perplexity", higher_is_better=False),
            Metric("next_token_accuracy", higher_is_better=True, is_fraction=True),
            Metric("loss", higher_is_better=False),
        )

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy, averaged over a sample's tokens."""
        losses_BL = token_losses(outputs[_OUTPUT], targets[_TARGET], label_smoothing=self.label_smoothing)
        return mean_of_counted(losses_BL, targets[_TARGET])

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """KL divergence from the teacher's distribution over the vocabulary, averaged over a sample's tokens."""
        losses_BL = class_divergence(outputs[_OUTPUT], teacher_outputs[_OUTPUT], 2, temperature)
        return mean_of_counted(losses_BL, targets[_TARGET])

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cross-entropy of all tokens, their number, how many were predicted; the losses of the samples."""
        next_BL = targets[_TARGET]
        losses_BL = token_losses(outputs[_OUTPUT], next_BL).double()
        return {
            "cross_entropy": losses_BL.sum(),
            "tokens": (next_BL != IGNORE).sum(),
            "right": (outputs[_OUTPUT].argmax(2) == next_BL).sum(),
            "loss": mean_of_counted(losses_BL, next_BL).sum(),
        }

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        """Perplexity is exp(cross-entropy per token), over all tokens of the split."""
        num_tokens = max(1, int(sums["tokens"]))
        return {
            "perplexity": math.exp(min(float(sums["cross_entropy"]) / num_tokens, _MAX_EXPONENT)),
            "next_token_accuracy": int(sums["right"]) / num_tokens,
            "loss": float(sums["loss"]) / num_samples,
            "num_tokens": num_tokens,
        }

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction`, int64 (B, L), -1 beyond the text; `score`: minus its loss, without smoothing."""
        next_BL = targets[_TARGET]
        predicted_BL = outputs[_OUTPUT].argmax(2).masked_fill(next_BL == IGNORE, IGNORE)
        return {"prediction": predicted_BL, "score": -mean_of_counted(token_losses(outputs[_OUTPUT], next_BL), next_BL)}

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        next_BL = targets[_TARGET]
        losses_BL = token_losses(outputs[_OUTPUT], next_BL).double()
        num_tokens_B, num_right_B = (next_BL != IGNORE).sum(1), (outputs[_OUTPUT].argmax(2) == next_BL).sum(1)
        return {
            "perplexity": torch.stack([losses_BL.sum(1), num_tokens_B], dim=1),
            "next_token_accuracy": torch.stack([num_right_B, num_tokens_B], dim=1),
            "loss": mean_of_counted(losses_BL, next_BL),
        }

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        import numpy as np

        return {
            "perplexity": np.exp(np.minimum(fraction_of(totals["perplexity"]), _MAX_EXPONENT)),
            "next_token_accuracy": fraction_of(totals["next_token_accuracy"]),
            "loss": totals["loss"] / num_samples,
        }

    def worst_sums(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """No token is right."""
        return {"next_token_accuracy": sums["next_token_accuracy"] * [0, 1]}

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:
        check_token_targets(split, targets[_TARGET], self.vocabulary_size, "tokens")
