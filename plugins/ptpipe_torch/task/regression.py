"""Numbers for each sample.

Shape legend: B samples of a batch, T targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ptpipe import JSON, StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo
from ptpipe_torch.model.signature import BATCH, Meanings, TensorSpec
from ptpipe_torch.task.task import Metric, Task, meaning_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_OUTPUT, _TARGET = "predictions", "targets"
_ROUNDING = 1e-13
"""Of a sum of squares in float64: a variance below it is that of a constant."""


class Regression(Task):
    """Networks return `predictions`, float32 (B, T), in the units of `targets`, float32 (B, T).

    The loss is of differences in units of the targets' standard deviation, so that learning rates don't depend on the
    targets' units.
    """

    target_names: tuple[str, ...] = Field(min_length=1)
    mean: tuple[float, ...]
    """Of each target, over train."""
    std: tuple[Annotated[float, Field(gt=0)], ...]
    loss: Literal["mse", "mae", "huber"] = "mse"
    huber_delta: float = Field(1.0, gt=0)
    """Where `huber` turns from squares to absolute values, in standard deviations (Huber, 1964)."""

    @model_validator(mode="after")
    def _has_statistics(self) -> Self:
        if not len(self.mean) == len(self.std) == len(self.target_names):
            raise ValueError("mean and std have a number for each target")
        return self

    @property
    def num_targets(self) -> int:
        """T."""
        return len(self.target_names)

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {_TARGET: ArrayInfo(dtype="float32", shape=(self.num_targets,))}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_OUTPUT, "float32", (BATCH, self.num_targets)),)

    @property
    def meanings(self) -> Meanings:
        return {_OUTPUT: meaning_of(self.target_names)}

    @property
    def output_scale(self) -> tuple[float, ...]:
        """The targets' standard deviation."""
        return self.std

    @property
    def output_shift(self) -> tuple[float, ...]:
        """The targets' mean."""
        return self.mean

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("r2", higher_is_better=True),
            Metric("rmse", higher_is_better=False),
            Metric("mae", higher_is_better=False),
            Metric("loss", higher_is_better=False),
        )

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mean over the targets of the loss that `loss` names."""
        import torch
        from torch.nn.functional import huber_loss

        std_T = torch.tensor(self.std, device=targets[_TARGET].device)
        errors_BT = (outputs[_OUTPUT].float() - targets[_TARGET]) / std_T
        match self.loss:
            case "mse":
                losses_BT = errors_BT.square()
            case "mae":
                losses_BT = errors_BT.abs()
            case "huber":
                losses_BT = huber_loss(errors_BT, torch.zeros_like(errors_BT), reduction="none", delta=self.huber_delta)
        return losses_BT.mean(1)

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """Squared difference to the teacher's predictions, in standard deviations, averaged over the targets."""
        import torch

        std_T = torch.tensor(self.std, device=outputs[_OUTPUT].device)
        return ((outputs[_OUTPUT].float() - teacher_outputs[_OUTPUT].float()) / std_T).square().mean(1)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums over the samples, for each target; those of the targets are of differences from `mean`."""
        import torch

        predictions_BT, targets_BT = outputs[_OUTPUT].double(), targets[_TARGET].double()
        errors_BT = predictions_BT - targets_BT
        centred_BT = targets_BT - torch.tensor(self.mean, dtype=torch.float64, device=targets_BT.device)
        return {
            "squared_error": errors_BT.square().sum(0),
            "absolute_error": errors_BT.abs().sum(0),
            "target": centred_BT.sum(0),
            "squared_target": centred_BT.square().sum(0),
            "loss": self.losses(outputs, targets).double().sum(),
        }

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        """R2 (coefficient of determination), RMSE and MAE, averaged over the targets; `per_target` has each one's."""
        import numpy as np

        variance_T = sums["squared_target"] - sums["target"] ** 2 / num_samples
        variance_T = np.where(variance_T > _ROUNDING * sums["squared_target"], variance_T, 0)
        pairs = zip(sums["squared_error"].tolist(), variance_T.tolist(), strict=True)
        of_target = {
            # As scikit-learn's r2_score where a target is constant.
            "r2": [1 - error / variance if variance > 0 else float(error == 0) for error, variance in pairs],
            "rmse": [(error / num_samples) ** 0.5 for error in sums["squared_error"].tolist()],
            "mae": [error / num_samples for error in sums["absolute_error"].tolist()],
        }
        figures: dict[str, JSON] = {name: sum(values) / self.num_targets for name, values in of_target.items()}
        rows: list[JSON] = [
            {"name": name, **{metric: values[number] for metric, values in of_target.items()}}
            for number, name in enumerate(self.target_names)
        ]
        return figures | {"loss": float(sums["loss"]) / num_samples, "per_target": rows}

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction` and `targets`, float32 (B, T); `score`: the negative loss."""
        return {
            "prediction": outputs[_OUTPUT].float(),
            "score": -self.losses(outputs, targets),
            "targets": targets[_TARGET],
        }

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        predictions_BT, targets_BT = outputs[_OUTPUT].double(), targets[_TARGET].double()
        errors_BT = predictions_BT - targets_BT
        centred_BT = targets_BT - torch.tensor(self.mean, dtype=torch.float64, device=targets_BT.device)
        return {
            "r2": torch.stack([errors_BT.square(), centred_BT, centred_BT.square()], dim=1),
            "rmse": errors_BT.square(),
            "mae": errors_BT.abs(),
            "loss": self.losses(outputs, targets).double(),
        }

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        import numpy as np

        error_RT, target_RT, squared_target_RT = np.moveaxis(totals["r2"], 1, 0)
        variance_RT = squared_target_RT - target_RT**2 / num_samples
        varies_RT = variance_RT > _ROUNDING * squared_target_RT
        with np.errstate(divide="ignore", invalid="ignore"):  # the branch that is not taken
            r2_RT = np.where(varies_RT, 1 - error_RT / variance_RT, error_RT == 0)
        return {
            "r2": r2_RT.mean(axis=1),
            "rmse": np.sqrt(totals["rmse"] / num_samples).mean(axis=1),
            "mae": (totals["mae"] / num_samples).mean(axis=1),
            "loss": totals["loss"] / num_samples,
        }

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:
        import numpy as np

        finite_NT = np.isfinite(targets[_TARGET].values())
        if not finite_NT.all():
            row, number = np.argwhere(~finite_NT)[0]
            raise StageError(f"split {split} has a {self.target_names[number]} that is not finite, in sample {row}")
