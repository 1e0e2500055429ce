"""Any number of labels for each sample.

Shape legend: B samples of a batch, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ptpipe import JSON, StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo
from ptpipe_torch.model.signature import BATCH, Meanings, TensorSpec
from ptpipe_torch.task.classification import f1_of, named, without_support
from ptpipe_torch.task.ranking import AVERAGE_PRECISION, MAX_RANKED, ROC_AUC
from ptpipe_torch.task.soft_targets import label_divergence
from ptpipe_torch.task.task import Metric, Task, meaning_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_OUTPUT, _TARGET = "logits", "labels"


class MultiLabel(Task):
    """Networks return `logits`, float32 (B, K), above 0 for labels that a sample has; targets are `labels`, 0 or 1."""

    label_names: tuple[str, ...] = Field(min_length=1)

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {_TARGET: ArrayInfo(dtype="float32", shape=(len(self.label_names),))}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_OUTPUT, "float32", (BATCH, len(self.label_names))),)

    @property
    def probability_functions(self) -> Mapping[str, Literal["softmax", "sigmoid"]]:
        """The probability of each label."""
        return {_OUTPUT: "sigmoid"}

    @property
    def meanings(self) -> Meanings:
        return {_OUTPUT: meaning_of(self.label_names)}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        macro_f1 = Metric("macro_f1", higher_is_better=True, is_fraction=True)
        exact_match = Metric("exact_match", higher_is_better=True, is_fraction=True)
        of_ranking = (ROC_AUC, AVERAGE_PRECISION) if len(self.label_names) <= MAX_RANKED else ()
        return (macro_f1, *of_ranking, exact_match, Metric("loss", higher_is_better=False))

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Binary cross-entropy, averaged over the labels."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        losses_BK = binary_cross_entropy_with_logits(outputs[_OUTPUT].float(), targets[_TARGET], reduction="none")
        return losses_BK.mean(1)

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """KL divergence from the teacher's probability of each label, averaged over the labels."""
        return label_divergence(outputs[_OUTPUT], teacher_outputs[_OUTPUT], temperature).mean(1)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """For each label how often it was predicted, right, and there; exact matches; the losses."""
        predicted_BK, has_BK = outputs[_OUTPUT] > 0, targets[_TARGET] > 0
        return {
            "predicted": predicted_BK.sum(0),
            "right": (predicted_BK & has_BK).sum(0),
            "support": has_BK.sum(0),
            "exact": (predicted_BK == has_BK).all(1).sum(),
            "loss": self.losses(outputs, targets).double().sum(),
        }

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        """F1 of each label, and their mean; a label that is neither there nor predicted has 0, as in scikit-learn.

        `support` and `others` are how many samples have the label and don't, `predicted` for how many it is predicted.
        """
        counts = [sums[name].astype(int).tolist() for name in ("predicted", "right", "support")]
        rows: list[JSON] = []
        f1s = []
        for name, predicted, right, support in zip(self.label_names, *counts, strict=True):
            f1s.append(2 * right / (predicted + support) if predicted + support else 0.0)
            precision, recall = right / predicted if predicted else None, right / support if support else None
            numbers = {"support": support, "others": num_samples - support, "predicted": predicted}
            rows.append({"name": name, "f1": f1s[-1], "precision": precision, "recall": recall, **numbers})
        return {
            "macro_f1": sum(f1s) / len(f1s),
            "exact_match": int(sums["exact"]) / num_samples,
            "loss": float(sums["loss"]) / num_samples,
            "per_label": rows,
        }

    def label_scores(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        import torch

        if len(self.label_names) > MAX_RANKED:
            return None
        return torch.stack([outputs[_OUTPUT].float(), targets[_TARGET]], dim=2)

    @property
    def score_names(self) -> tuple[str, ...]:
        return self.label_names

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction`, uint8 (B, K); `score`: the fraction of the labels that are right; `logits`; `labels`."""
        import torch

        predicted_BK = outputs[_OUTPUT] > 0
        score_B = (predicted_BK == (targets[_TARGET] > 0)).float().mean(1)
        kept = {"logits": outputs[_OUTPUT], "labels": targets[_TARGET].to(torch.uint8)}
        return {"prediction": predicted_BK.to(torch.uint8), "score": score_B, **kept}

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        predicted_BK, has_BK = outputs[_OUTPUT] > 0, targets[_TARGET] > 0
        return {
            "macro_f1": torch.stack([predicted_BK & has_BK, predicted_BK.byte() + has_BK.byte()], dim=1),
            "exact_match": (predicted_BK == has_BK).all(1),
            "loss": self.losses(outputs, targets).double(),
        }

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        means = {name: totals[name] / num_samples for name in ("exact_match", "loss")}
        return {"macro_f1": f1_of(totals["macro_f1"]).mean(axis=1), **means}

    def worst_sums(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Every label is wrong."""
        import numpy as np

        return {"macro_f1": np.broadcast_to([[0], [1]], sums["macro_f1"].shape)}

    def undefined(self, figures: Mapping[str, JSON], split: str) -> list[str]:
        """Labels that no sample has, and those that all have."""
        rows: Any = figures["per_label"]
        if len(self.label_names) > MAX_RANKED:
            return without_support(rows, split, *self.label_names)
        what = "F1 is undefined there and counts as 0; roc_auc and average_precision leave it out"
        absent = without_support(rows, split, *self.label_names, what=what)
        everywhere = [str(row["name"]) for row in rows if not row["others"]]
        if everywhere:
            absent.append(f"{split} has no sample without {named(everywhere)}: roc_auc leaves it out")
        return absent

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:
        import numpy as np

        wrong_NK = ~np.isin(targets[_TARGET].values(), (0, 1))
        if wrong_NK.any():
            number = np.argwhere(wrong_NK)[0][1]
            raise StageError(f"split {split} has a {self.label_names[number]} other than 0 and 1")
