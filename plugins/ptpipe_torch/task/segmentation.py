"""A class for each pixel.

Shape legend: B samples of a batch, K classes, H height, W width, P counted pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, NonNegativeInt, PositiveInt

from ptpipe import JSON
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.model.signature import BATCH, TensorSpec
from ptpipe_torch.task.class_task import ClassTask
from ptpipe_torch.task.soft_targets import class_divergence
from ptpipe_torch.task.task import Metric

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ptpipe_torch.data.raw_form import Conversion

_OUTPUT, _TARGET = "logits", "masks"


class MaskInfo(ColumnInfo):
    """The class of each pixel: uint8 of shape (B, H, W), which becomes int64. It is augmented as its image is."""

    shape_HW: tuple[PositiveInt, PositiveInt]
    ignore: int = Field(ge=0, le=255)
    """The value of pixels that don't count, and of those that augmentation uncovers."""

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, "int64", (BATCH, *self.shape_HW))

    def augment(
        self, values_B: npt.NDArray[Any], positions_B: npt.NDArray[np.int64], seed: Sequence[int], names: Sequence[str]
    ) -> npt.NDArray[Any]:
        from ptpipe_torch.data.augment import augment

        return augment(values_B[..., None], positions_B, seed, names, blank=self.ignore)[..., 0]

    def conversion(self, name: str) -> Conversion:
        check = super().conversion(name)
        return lambda values_BHW, channels_last: check(values_BHW.long(), channels_last)


def _predicted(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the class of each pixel, int64 (B, H, W), the first of equal ones.

    argmax takes 3 to 20 times as long on CPUs, measured with torch 2.13 for 2 to 21 classes of 256 x 256 pixels.
    """
    return outputs[_OUTPUT].max(1).indices


class Segmentation(ClassTask):
    """Networks return `logits`, float32 (B, K, H, W); the target is `masks`, int64 (B, H, W), numbers of classes."""

    class_names: tuple[str, ...] = Field(min_length=1, max_length=255)
    shape_HW: tuple[PositiveInt, PositiveInt]
    ignore: NonNegativeInt = Field(default=255, le=255)
    """The number in masks of pixels that don't count.

    It may be that of a class: no IoU is of it, and where the network predicts it, the pixel's class is missed.
    """

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {_TARGET: MaskInfo(shape_HW=self.shape_HW, ignore=self.ignore)}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_OUTPUT, "float32", (BATCH, self.num_classes, *self.shape_HW)),)

    @property
    def class_scores(self) -> Mapping[str, int]:
        return {_OUTPUT: 1}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("mean_iou", higher_is_better=True, is_fraction=True),
            Metric("pixel_accuracy", higher_is_better=True, is_fraction=True),
            Metric("loss", higher_is_better=False),
        )

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy, averaged over a sample's pixels that count; 0 where none does."""
        from torch.nn.functional import cross_entropy

        masks_BHW = targets[_TARGET]
        tensors = outputs[_OUTPUT].float(), masks_BHW, self._weights(masks_BHW.device)
        losses_BHW = cross_entropy(
            *tensors, reduction="none", ignore_index=self.ignore, label_smoothing=self.label_smoothing
        )
        num_counted_B = (masks_BHW != self.ignore).sum((1, 2))
        return losses_BHW.sum((1, 2)) / num_counted_B.clamp(min=1)

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """KL divergence from the teacher's classes, averaged over a sample's pixels that count."""
        losses_BHW = class_divergence(outputs[_OUTPUT], teacher_outputs[_OUTPUT], 1, temperature)
        counted_BHW = targets[_TARGET] != self.ignore
        return (losses_BHW * counted_BHW).sum((1, 2)) / counted_BHW.sum((1, 2)).clamp(min=1)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The confusion matrix of the pixels that count, rows are masks; the losses, without smoothing."""
        return {
            "confusion": self._confusions(outputs, targets).sum(0),
            "loss": self.with_label_smoothing(0.0).losses(outputs, targets).double().sum(),
        }

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        """Intersection over union of each class, over all pixels of the split; their mean over classes that occur.

        That of `ignore`, where it is a class, is null.
        """
        confusion_KK = sums["confusion"].reshape(self.num_classes, self.num_classes)
        hits_K = confusion_KK.diagonal()
        union_K = confusion_KK.sum(axis=0) + confusion_KK.sum(axis=1) - hits_K
        union_K[self.ignore : self.ignore + 1] = 0
        ious = [float(hits / union) if union else None for hits, union in zip(hits_K, union_K, strict=True)]
        occurring = [iou for iou in ious if iou is not None]
        rows: list[JSON] = [{"name": name, "iou": iou} for name, iou in zip(self.class_names, ious, strict=True)]
        return {
            "mean_iou": sum(occurring) / max(1, len(occurring)),
            "pixel_accuracy": float(hits_K.sum() / max(1, confusion_KK.sum())),
            "loss": float(sums["loss"]) / num_samples,
            "class_names": list(self.class_names),
            "per_class": rows,
            "confusion": [[int(count) for count in row] for row in confusion_KK],
        }

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction`, uint8 (B, H, W); `score`: the sample's fraction of pixels that are right."""
        import torch

        confusion_BKK = self._confusions(outputs, targets).view(-1, self.num_classes, self.num_classes)
        num_right_B = confusion_BKK.diagonal(dim1=1, dim2=2).sum(1)
        score_B = num_right_B / confusion_BKK.sum((1, 2)).clamp(min=1)
        return {"prediction": _predicted(outputs).to(torch.uint8), "score": score_B}

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        confusion_BKK = self._confusions(outputs, targets).view(-1, self.num_classes, self.num_classes)
        hits_BK = confusion_BKK.diagonal(dim1=1, dim2=2)
        union_BK = confusion_BKK.sum(1) + confusion_BKK.sum(2) - hits_BK
        union_BK[:, self.ignore : self.ignore + 1] = 0
        return {
            "mean_iou": torch.stack([hits_BK, union_BK], dim=1).int(),
            "pixel_accuracy": torch.stack([hits_BK.sum(1), confusion_BKK.sum((1, 2))], dim=1),
            "loss": self.with_label_smoothing(0.0).losses(outputs, targets).double(),
        }

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        import numpy as np

        hits_RK, union_RK = np.moveaxis(totals["mean_iou"], 1, 0)
        num_right_R, num_pixels_R = totals["pixel_accuracy"].T
        ious_RK = hits_RK / np.maximum(1, union_RK)
        return {
            "mean_iou": ious_RK.sum(axis=1) / np.maximum(1, (union_RK > 0).sum(axis=1)),
            "pixel_accuracy": num_right_R / np.maximum(1, num_pixels_R),
            "loss": totals["loss"] / num_samples,
        }

    def worst_sums(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """No pixel is right; those of a class in the mask or in the prediction stay as many."""
        return {"mean_iou": sums["mean_iou"] * [[0], [1]], "pixel_accuracy": sums["pixel_accuracy"] * [0, 1]}

    def undefined(self, figures: Mapping[str, JSON], split: str) -> list[str]:
        """An IoU without a pixel that counts."""
        rows = cast("Sequence[Mapping[str, JSON]]", figures["per_class"])
        has_none = all(row["iou"] is None for row in rows)
        return [f"{split} has no pixel that counts: the IoU is undefined there"] if has_none else []

    def _confusions(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the confusion matrix of each sample, int64 (B, K * K)."""
        import torch

        masks_BHW, num_cells = targets[_TARGET], self.num_classes**2
        numbers_B11 = torch.arange(len(masks_BHW), device=masks_BHW.device)[:, None, None]
        cells_BHW = numbers_B11 * num_cells + masks_BHW * self.num_classes + _predicted(outputs)
        cells_P = cells_BHW[masks_BHW != self.ignore]
        return torch.bincount(cells_P, minlength=len(masks_BHW) * num_cells).view(len(masks_BHW), num_cells)
