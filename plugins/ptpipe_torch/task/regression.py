"""Numbers for each sample, or for each position of it: maps, signals, images.

Shape legend: B samples of a batch, T targets, P positions (1 where targets are single numbers), R resamples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import Field, PositiveInt, model_validator

from ptpipe import JSON, StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo
from ptpipe_torch.model.signature import BATCH, Meanings, TensorSpec
from ptpipe_torch.task.constants import constant
from ptpipe_torch.task.task import Metric, Task, meaning_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_OUTPUT, _TARGET = "predictions", "targets"
_ROUNDING = 1e-13
"""Of a sum of squares in float64: a variance below it is that of a constant."""
_LARGEST_PSNR_DB = 100.0
"""Of a sample that is predicted exactly, whose ratio is infinite: the mean over all samples stays a number."""
_MIRRORING = "flip"
_FAR_R2 = -1.0
"""Below it a network is farther from the targets than their mean is by more than a standard deviation."""
_SLACK = 1.1
"""Times the error of always answering 0 that a network may have whose outputs have not left 0 behind."""


class MapInfo(ArrayInfo):
    """Targets that have positions, float32 (B, T, ...): they are mirrored as their image is, (B, T, H, W)."""

    def check_augment(self, name: str, names: Sequence[str]) -> None:
        if others := [other for other in names if other != _MIRRORING]:
            raise StageError(
                f"augment: {others[0]} would change the images and not {name}, which has positions and no value for "
                f"what {others[0]} uncovers or blends: use flip alone, or augment in a data set of your own"
            )
        if names and len(self.shape) != 3:
            raise StageError(f"augment: {name} is no map (height, width) that flip could mirror as the images")

    def augment(
        self, values_B: npt.NDArray[Any], positions_B: npt.NDArray[np.int64], seed: Sequence[int], names: Sequence[str]
    ) -> npt.NDArray[Any]:
        from ptpipe_torch.data.augment import augment

        augment(values_B.transpose(0, 2, 3, 1), positions_B, seed, names)  # mirrors in place
        return values_B


class Regression(Task):
    """Networks return `predictions`, float32 (B, T, ...), in the units of `targets`, float32 (B, T, ...).

    The loss is of differences in units of the targets' standard deviation, so that learning rates don't depend on the
    targets' units.
    """

    target_names: tuple[str, ...] = Field(min_length=1)
    mean: tuple[float, ...]
    """Of each target, over train and all positions."""
    std: tuple[Annotated[float, Field(gt=0)], ...]
    positions: tuple[PositiveInt, ...] = ()
    """The shape that each target has in a sample: (H, W) of a map; empty: it is one number."""
    data_range: float | None = Field(default=None, gt=0)
    """Difference of the largest and the smallest value that targets can have; given, `psnr_db` is the primary metric.

    As in torchmetrics and scikit-image.
    """
    loss: Literal["mse", "mae", "huber"] = "mse"
    huber_delta: float = Field(default=1.0, gt=0)
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
        info = MapInfo if self.positions else ArrayInfo
        return {_TARGET: info(dtype="float32", shape=(self.num_targets, *self.positions))}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_OUTPUT, "float32", (BATCH, self.num_targets, *self.positions)),)

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
        psnr = () if self.data_range is None else (Metric("psnr_db", higher_is_better=True),)
        return (
            *psnr,
            Metric("r2", higher_is_better=True),
            Metric("rmse", higher_is_better=False),
            Metric("mae", higher_is_better=False),
            Metric("loss", higher_is_better=False),
        )

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mean over the targets and positions of the loss that `loss` names."""
        import torch
        from torch.nn.functional import huber_loss

        errors = (outputs[_OUTPUT].float() - targets[_TARGET]) / self._of_targets(self.std, targets[_TARGET])
        match self.loss:
            case "mse":
                losses = errors.square()
            case "mae":
                losses = errors.abs()
            case "huber":
                losses = huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=self.huber_delta)
        return losses.flatten(1).mean(1)

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """Squared difference to the teacher's predictions, in standard deviations, averaged as `losses` are."""
        difference = outputs[_OUTPUT].float() - teacher_outputs[_OUTPUT].float()
        return (difference / self._of_targets(self.std, difference)).square().flatten(1).mean(1)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums over the samples, for each target; those of the targets are of differences from `mean`."""
        sums = self._sums_of_samples(outputs, targets)
        return {name: of_sample_B.sum(0) for name, of_sample_B in sums.items()}

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        """R2 (coefficient of determination), RMSE and MAE, averaged over the targets; `per_target` has each one's.

        Over all samples and positions. `psnr_db`: the mean over the samples of 10 log10 of the square of `data_range`
        over the mean squared error, 100 dB at most.
        """
        import numpy as np

        num_values = num_samples * prod(self.positions)
        variance_T = sums["squared_target"] - sums["target"] ** 2 / num_values
        variance_T = np.where(variance_T > _ROUNDING * sums["squared_target"], variance_T, 0)
        pairs = zip(sums["squared_error"].tolist(), variance_T.tolist(), strict=True)
        of_target = {
            # As scikit-learn's r2_score where a target is constant.
            "r2": [1 - error / variance if variance > 0 else float(error == 0) for error, variance in pairs],
            "rmse": [(error / num_values) ** 0.5 for error in sums["squared_error"].tolist()],
            "mae": [error / num_values for error in sums["absolute_error"].tolist()],
        }
        figures: dict[str, JSON] = {name: sum(values) / self.num_targets for name, values in of_target.items()}
        rows: list[JSON] = [
            {
                "name": name,
                "is_constant": not variance_T[number],
                **{metric: values[number] for metric, values in of_target.items()},
            }
            for number, name in enumerate(self.target_names)
        ]
        means: dict[str, JSON] = {name: float(sums[name]) / num_samples for name in ("psnr_db", "loss") if name in sums}
        return means | figures | {"per_target": rows}

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction` and, where they are single numbers, `targets`, float32; `score`: the negative loss."""
        kept = {"prediction": outputs[_OUTPUT].float(), "score": -self.losses(outputs, targets)}
        return kept if self.positions else kept | {"targets": targets[_TARGET]}

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        sums = self._sums_of_samples(outputs, targets)
        squared_error_BT = sums["squared_error"]
        of_metric = {
            "r2": torch.stack([squared_error_BT, sums["target"], sums["squared_target"]], dim=1),
            "rmse": squared_error_BT,
            "mae": sums["absolute_error"],
        }
        return of_metric | {name: sums[name] for name in ("psnr_db", "loss") if name in sums}

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        import numpy as np

        num_values = num_samples * prod(self.positions)
        error_RT, target_RT, squared_target_RT = np.moveaxis(totals["r2"], 1, 0)
        variance_RT = squared_target_RT - target_RT**2 / num_values
        varies_RT = variance_RT > _ROUNDING * squared_target_RT
        with np.errstate(divide="ignore", invalid="ignore"):  # the branch that is not taken
            r2_RT = np.where(varies_RT, 1 - error_RT / variance_RT, error_RT == 0)
        return {
            "r2": r2_RT.mean(axis=1),
            "rmse": np.sqrt(totals["rmse"] / num_values).mean(axis=1),
            "mae": (totals["mae"] / num_values).mean(axis=1),
        } | {name: totals[name] / num_samples for name in ("psnr_db", "loss") if name in totals}

    def undefined(self, figures: Mapping[str, JSON], split: str) -> list[str]:
        """The R2 of targets that are constant."""
        rows = cast("Sequence[Mapping[str, JSON]]", figures["per_target"])
        named = ", ".join(str(row["name"]) for row in rows if row["is_constant"])
        return [f"{split} has the same value of {named} in all samples: R2 is undefined there"] if named else []

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:
        import numpy as np

        finite = np.isfinite(targets[_TARGET].values())
        if not finite.all():
            number = np.argwhere(~finite)[0][1]
            raise StageError(f"split {split} has a {self.target_names[number]} that is not finite")

    def trivial_answer(self, targets: Mapping[str, Column]) -> tuple[str, float] | None:
        """The mean, whose R2 is 0."""
        return ("the mean", 0.0) if self.data_range is None else None

    def cause_of_errors(self, figures: Mapping[str, JSON]) -> str | None:
        """Outputs in other units than the targets': between 0 and a mean of many standard deviations.

        What begins near 0 reaches such a mean late, by its last bias alone.
        """
        r2, rmse = cast("float", figures["r2"]), cast("float", figures["rmse"])
        rmse_of_zeros = sum(map(hypot, self.mean, self.std)) / self.num_targets
        triples = zip(self.mean, self.std, self.target_names, strict=True)
        mean, std, name = max(triples, key=lambda own: abs(own[0]) / own[1])
        if abs(mean) < std or r2 > _FAR_R2 or rmse > _SLACK * rmse_of_zeros:
            return None
        return (
            f"its outputs are off by {_short(rmse)} (RMSE) where always answering 0 is by {_short(rmse_of_zeros)}, "
            f"since {name} is {_short(mean)} ± {_short(std)}: return the target's units, e.g. end `forward` with "
            "`* std + mean` (docs/data.md)"
        )

    def _of_targets(self, numbers_T: Iterable[float], like: torch.Tensor) -> torch.Tensor:
        """Return a number for each target, as `like`, (B, T, ...), is divided by them or less them."""
        ones = (1,) * len(self.positions)
        return constant(tuple(numbers_T), like.device, like.dtype).view(-1, *ones)

    def _sums_of_samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what `sums` adds, (B, T) for each target, (B,) of loss and PSNR; float64."""
        predictions, known = outputs[_OUTPUT].double(), targets[_TARGET].double()
        errors_BTP = (predictions - known).reshape(len(known), self.num_targets, -1)
        centred_BTP = (known - self._of_targets(self.mean, known)).reshape(errors_BTP.shape)
        squared_error_BT = errors_BTP.square().sum(2)
        sums = {
            "squared_error": squared_error_BT,
            "absolute_error": errors_BTP.abs().sum(2),
            "target": centred_BTP.sum(2),
            "squared_target": centred_BTP.square().sum(2),
            "loss": self.losses(outputs, targets).double(),
        }
        if self.data_range is not None:
            mean_B = squared_error_BT.sum(1) / (self.num_targets * prod(self.positions) * self.data_range**2)
            sums["psnr_db"] = -10 * mean_B.clamp(min=10 ** (-_LARGEST_PSNR_DB / 10)).log10()
        return sums


def _short(number: float) -> str:
    """Return a number with two digits that count: `4,300`."""
    return f"{float(f'{number:.1e}'):,.6g}"
