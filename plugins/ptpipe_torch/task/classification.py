"""One class for each sample.

Shape legend: N samples, B of a batch, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from ptpipe import JSON, StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo
from ptpipe_torch.model.signature import BATCH, TensorSpec
from ptpipe_torch.task.class_task import ClassTask
from ptpipe_torch.task.ranking import AVERAGE_PRECISION, MAX_RANKED, ROC_AUC, ROC_AUC_OVR
from ptpipe_torch.task.soft_targets import class_divergence
from ptpipe_torch.task.task import Metric

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_TOP = 5
_MAX_NAMED = 10


class Classification(ClassTask):
    """Networks return `logits`, float32 (B, K); the target is `labels`, int64 (B,), numbers of classes.

    `Classification(class_names=("cat", "dog"))`: as in all tasks and facts of columns, fields are given by name.
    """

    focal_gamma: float = Field(default=0.0, ge=0)
    """Exponent of the focal loss, (1 - p)^gamma times the loss, p: probability of the label (Lin et al., 2017)."""
    positive_class: str | None = None
    """The class to find, which has F1, area under the ROC curve and average precision; None: these are no metrics."""
    positive_metric: Literal["f1", "roc_auc", "average_precision"] = "f1"
    """Which of the three is the primary metric; without a positive class, accuracy is."""
    ovr_metric: Literal["roc_auc_ovr", "average_precision"] | None = None
    """Which of both, means over all classes, each against the rest, is the primary metric; None: they are no metrics.

    Of 3 to 100 classes, without a positive one.
    """

    @model_validator(mode="after")
    def _has_the_ranked_classes(self) -> Self:
        if self.positive_class is not None and self.positive_class not in self.class_names:
            raise ValueError(f"positive_class: {self.positive_class!r} is no class")
        if self.ovr_metric is not None and (self.positive_class is not None or not 2 < self.num_classes <= MAX_RANKED):
            raise ValueError(f"ovr_metric: {self.ovr_metric} is of 3 to {MAX_RANKED} classes, without a positive one")
        return self

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {"labels": ArrayInfo(dtype="int64")}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("logits", "float32", (BATCH, self.num_classes)),)

    @property
    def class_scores(self) -> Mapping[str, int]:
        return {"logits": 1}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        accuracy = Metric("accuracy", higher_is_better=True, is_fraction=True)
        top5 = Metric("top5_accuracy", higher_is_better=True, is_fraction=True)
        loss = Metric("loss", higher_is_better=False)
        f1 = Metric("f1", higher_is_better=True, is_fraction=True)
        metrics = (accuracy, top5, loss) if self.num_classes > _TOP else (accuracy, loss)
        if self.ovr_metric is not None:
            of_all = sorted((ROC_AUC_OVR, AVERAGE_PRECISION), key=lambda metric: metric.name != self.ovr_metric)
            return (*of_all, *metrics)
        of_positive = sorted((f1, ROC_AUC, AVERAGE_PRECISION), key=lambda metric: metric.name != self.positive_metric)
        return metrics if self.positive_class is None else (*of_positive, *metrics)

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy, weighted by class and focal where the facts say so."""
        return self._losses(outputs["logits"].float(), targets["labels"], self.label_smoothing)

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """KL divergence from the teacher's distribution over the classes."""
        return class_divergence(outputs["logits"], teacher_outputs["logits"], 1, temperature)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The confusion matrix, rows are labels; `losses` in float64, without smoothing; labels in the top 5."""
        import torch

        logits_BK, labels_B = outputs["logits"], targets["labels"]
        cells_B = labels_B * self.num_classes + logits_BK.argmax(1)
        sums = {
            "confusion": torch.bincount(cells_B, minlength=self.num_classes**2),
            "loss": self._losses(logits_BK.double(), labels_B).sum(),
        }
        if self.num_classes > _TOP:
            sums["top5"] = (label_ranks(logits_BK, labels_B) < _TOP).sum()
        return sums

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        confusion_KK = sums["confusion"].reshape(self.num_classes, self.num_classes)
        figures: dict[str, JSON] = {"accuracy": int(confusion_KK.trace()) / num_samples}
        rows = per_class(confusion_KK, self.class_names)
        if self.positive_class is not None:
            figures["f1"] = rows[self.class_names.index(self.positive_class)]["f1"]
        if "top5" in sums:
            figures["top5_accuracy"] = int(sums["top5"]) / num_samples
        details: dict[str, JSON] = {
            "loss": float(sums["loss"]) / num_samples,
            "class_names": list(self.class_names),
            "per_class": [*rows],
            "confusion": [[int(count) for count in row] for row in confusion_KK],
        }
        return figures | details

    def label_scores(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """The logarithm of a class's odds against all others: where float32 has p = 1, it still ranks."""
        import torch

        if not self.score_names:
            return None
        labels_B = targets["labels"]
        numbers_L = torch.tensor([self.class_names.index(name) for name in self.score_names], device=labels_B.device)
        odds_BL = _log_odds(outputs["logits"].double())[:, numbers_L]
        return torch.stack([odds_BL, labels_B[:, None] == numbers_L], dim=2).float()

    @property
    def score_names(self) -> tuple[str, ...]:
        if self.positive_class is not None:
            return (self.positive_class,)
        return () if self.ovr_metric is None else self.class_names

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction`, int64 (B,): the first class of the maximum logit; `score`: 1 if right; `labels`; `logits`."""
        predicted_B = outputs["logits"].argmax(1)
        score_B = (predicted_B == targets["labels"]).float()
        return {"prediction": predicted_B, "score": score_B, "labels": targets["labels"], "logits": outputs["logits"]}

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        logits_BK, labels_B = outputs["logits"], targets["labels"]
        predicted_B = logits_BK.argmax(1)
        sums = {
            "accuracy": predicted_B == labels_B,
            "loss": self._losses(logits_BK.double(), labels_B),
        }
        if self.num_classes > _TOP:
            sums["top5_accuracy"] = label_ranks(logits_BK, labels_B) < _TOP
        if self.positive_class is not None:
            found_B, has_B = (of_B == self.class_names.index(self.positive_class) for of_B in (predicted_B, labels_B))
            sums["f1"] = torch.stack([found_B & has_B, found_B.byte() + has_B.byte()], dim=1)
        return sums

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        values = {name: total / num_samples for name, total in totals.items() if name != "f1"}
        return values if self.positive_class is None else {"f1": f1_of(totals["f1"]), **values}

    def worst_sums(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """A positive that is missed, or another class that is taken for it."""
        import numpy as np

        return {"f1": np.broadcast_to([0, 1], sums["f1"].shape)} if "f1" in sums else {}

    def undefined(self, figures: Mapping[str, JSON], split: str) -> list[str]:
        """Metrics of a class without a sample of it; an area under the ROC curve without any other."""
        if self.ovr_metric is not None:
            return self._undefined_of_all(figures["per_class"], split)
        if self.positive_class is None:
            return []
        rows, others = figures["per_class"], [name for name in self.class_names if name != self.positive_class]
        what = "F1, roc_auc and average_precision are undefined there and count as 0"
        if absent := without_support(rows, split, self.positive_class, what=what):
            return absent
        if len(_without_support(rows, others)) == len(others):
            return [f"{split} has samples of {self.positive_class!r} alone: roc_auc is undefined there and counts as 0"]
        return []

    def _undefined_of_all(self, rows: JSON, split: str) -> list[str]:
        absent = _without_support(rows, self.class_names)
        if not absent:
            return []
        what = "roc_auc_ovr and average_precision leave it out"
        found, there = without_support(rows, split, *absent, what=what), {*self.class_names} - {*absent}
        if len(there) == 1:
            found.append(
                f"{split} has samples of {there.pop()!r} alone: roc_auc_ovr is undefined there and counts as 0"
            )
        return found

    def target_bytes(
        self, targets: Mapping[str, Column], order_N: npt.NDArray[np.int64]
    ) -> Iterator[bytes | memoryview]:
        from ptpipe_torch.task.target_bytes import bytes_of

        return bytes_of(targets, order_N, self.class_names)

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:
        labels_N = targets["labels"].values()
        wrong_N = (labels_N < 0) | (labels_N >= self.num_classes)
        if wrong_N.any():
            label = labels_N[wrong_N.argmax()]
            raise StageError(f"split {split} has the label {label}; classes are numbered 0 to {self.num_classes - 1}")

    def trivial_answer(self, targets: Mapping[str, Column]) -> tuple[str, float] | None:
        """The most frequent class; None where its accuracy is not what is wanted."""
        import numpy as np

        if self.score_names or self.class_weights:
            return None
        labels_N = targets["labels"].values()
        return "the most frequent class", np.bincount(labels_N).max() / len(labels_N)

    def _losses(self, logits_BK: torch.Tensor, labels_B: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        import torch
        from torch.nn.functional import cross_entropy

        weights_K = self._weights(labels_B.device, logits_BK.dtype)
        losses_B = cross_entropy(logits_BK, labels_B, weights_K, reduction="none", label_smoothing=label_smoothing)
        if self.focal_gamma:
            losses_B = losses_B * torch.exp(self.focal_gamma * _log_of_others(logits_BK, labels_B))
        return losses_B


def _log_odds(logits_BK: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) of each class, (B, K), p: its softmax; without cancellation, also where p is near 1."""
    import torch

    top_B1 = logits_BK.argmax(1, keepdim=True)
    exponentials_BK = (logits_BK - logits_BK.gather(1, top_B1)).exp()
    rest_BK = exponentials_BK.sum(1, keepdim=True) - exponentials_BK  # of all but the top class, 1 or more
    odds_BK = logits_BK - logits_BK.gather(1, top_B1) - rest_BK.log()
    below_BK = logits_BK.scatter(1, top_B1, -torch.inf)
    return odds_BK.scatter(1, top_B1, logits_BK.gather(1, top_B1) - below_BK.logsumexp(1, keepdim=True))


def _log_of_others(logits_BK: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p), p: probability of the label; (B,). Finite also where p rounds to 1, as is its gradient."""
    import torch

    without_label_BK = logits_BK.scatter(1, labels_B[:, None], torch.finfo(logits_BK.dtype).min)
    return without_label_BK.logsumexp(1) - logits_BK.logsumexp(1)


def label_ranks(logits_BK: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """Return the rank of each sample's label among its logits; (B,) int64, 0 where the prediction is correct.

    Equal logits, common in int8 models, are ranked by class number, as argmax does.
    """
    import torch

    own_B1 = logits_BK.gather(1, labels_B[:, None])
    numbers_K = torch.arange(logits_BK.shape[1], device=logits_BK.device)
    tied_before_BK = (logits_BK == own_B1) & (numbers_K < labels_B[:, None])
    return ((logits_BK > own_B1) | tied_before_BK).sum(1)


def f1_of(totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return F1 from totals of shape (R, 2, ...): how often right, and how often predicted plus how often there."""
    import numpy as np

    return np.asarray(2 * totals[:, 0] / np.maximum(1, totals[:, 1]))


def without_support(
    rows: JSON, split: str, *names: str, what: str = "F1 is undefined there and counts as 0"
) -> list[str]:
    """Return a sentence that names those of `names` of which `split` has nothing, and `what` follows.

    `rows`: as `per_class` returns.
    """
    absent = _without_support(rows, names)
    if not absent:
        return []
    return [f"{split} has no sample of {named(absent)}: {what}"]


def named(names: Sequence[str]) -> str:
    """Return the first of the names, for a sentence."""
    return ", ".join(repr(name) for name in names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")


def _without_support(rows: JSON, names: Sequence[str]) -> list[str]:
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [str(row["name"]) for row in found if row["name"] in names and not row["support"]]


def per_class(confusion_KK: npt.NDArray[np.int64], class_names: Sequence[str]) -> list[dict[str, JSON]]:
    """Return name, precision, recall, F1 and two counts of each class; null where the divisor is 0, F1 then 0.

    `support`: how many samples have it; `predicted`: for how many it is predicted.
    """
    predicted_K, support_K = confusion_KK.sum(axis=0), confusion_KK.sum(axis=1)
    return [
        {
            "name": name,
            "precision": int(confusion_KK[k, k]) / int(predicted_K[k]) if predicted_K[k] else None,
            "recall": int(confusion_KK[k, k]) / int(support_K[k]) if support_K[k] else None,
            "f1": 2 * int(confusion_KK[k, k]) / max(1, int(predicted_K[k] + support_K[k])),
            "support": int(support_K[k]),
            "predicted": int(predicted_K[k]),
        }
        for k, name in enumerate(class_names)
    ]
