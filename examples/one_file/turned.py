"""A data set, a column and a task of one's own in one file: by which angle is a digit turned?

Shape legend: N images, B of a batch, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ptpipe import JSON, Context, StageConfig, stage
from ptpipe_torch import (
    BATCH,
    ArrayColumn,
    ArrayInfo,
    Column,
    ColumnInfo,
    Data,
    DatasetInfo,
    ImageInfo,
    LoaderOptions,
    Metric,
    Split,
    Task,
    TensorSpec,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class Direction(Task):
    """Networks return `direction`, float32 (B, 2), a vector of any length; the target is its angle, `degrees`."""

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {"degrees": ArrayInfo(dtype="float32")}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("direction", "float32", (BATCH, 2)),)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric("mean_error_degrees", higher_is_better=False), Metric("loss", higher_is_better=False))

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """1 minus the cosine of the angle between prediction and target."""
        import torch

        angle_B = torch.deg2rad(targets["degrees"])
        wanted_B2 = torch.stack([angle_B.cos(), angle_B.sin()], 1)
        return 1 - torch.cosine_similarity(outputs["direction"].float(), wanted_B2)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        losses_B = self.losses(outputs, targets).double()
        return {"error": self._errors(losses_B).sum(), "loss": losses_B.sum()}

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        return {
            "mean_error_degrees": float(sums["error"]) / num_samples,
            "loss": float(sums["loss"]) / num_samples,
        }

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {
            "prediction": outputs["direction"],
            "score": -self._errors(self.losses(outputs, targets)),
            "degrees": targets["degrees"],
        }

    def _errors(self, losses_B: torch.Tensor) -> torch.Tensor:
        return (1 - losses_B).clamp(-1, 1).arccos().rad2deg()


@dataclass(frozen=True, eq=False)
class TurnedColumn(Column):
    """Images that are turned when they are taken."""

    images_NHW: npt.NDArray[np.uint8]
    degrees_N: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.images_NHW)

    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        import numpy as np
        from PIL import Image

        pairs = zip(self.images_NHW[indices_B], self.degrees_N[indices_B].tolist(), strict=True)
        turned = [Image.fromarray(image).rotate(angle, Image.Resampling.BILINEAR) for image, angle in pairs]
        return np.stack([np.asarray(image) for image in turned])[..., np.newaxis]


class TurnedDigitsConfig(StageConfig):
    """Options of `data.turned_digits`."""

    num_images: int = Field(default=1500, ge=20, le=100_000, description="number of images of all splits together")
    batch_size: int = Field(default=64, ge=1, le=65536, description="images per batch")


@stage("data.turned_digits", packages=("numpy", "pillow", "scikit-learn"))
def turned_digits(config: TurnedDigitsConfig, ctx: Context) -> Data:
    """Draw handwritten digits of the class 4, enlarged to 16 x 16, each turned by a random angle."""
    import numpy as np
    from sklearn.datasets import load_digits

    bundled = load_digits()
    fours_NHW = (bundled.images[bundled.target == 4] * 15.9375).astype(np.uint8).repeat(2, axis=1).repeat(2, axis=2)
    rng = np.random.default_rng(ctx.seed)
    degrees_N = rng.uniform(-180, 180, config.num_images).astype(np.float32)
    every = Split(
        np.array([f"four/{number:05}" for number in range(config.num_images)]),
        {"images": TurnedColumn(fours_NHW[rng.integers(0, len(fours_NHW), config.num_images)], degrees_N)},
        {"degrees": ArrayColumn(degrees_N)},
    )
    bounds = [round(part * config.num_images) for part in (0, 0.7, 0.8, 1)]
    parts = zip(("train", "val", "test"), bounds, bounds[1:], strict=False)
    splits = {name: every.subset(np.arange(start, stop)) for name, start, stop in parts}
    splits["calibration"] = splits["train"].subset(np.arange(min(256, bounds[1])))
    images = ImageInfo(shape_CHW=(1, 16, 16), mean=(0.3,), std=(0.35,))
    return Data(DatasetInfo("turned fours", {"images": images}, Direction()), splits, LoaderOptions(config.batch_size))
