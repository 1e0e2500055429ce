"""What another network returns, as the targets: tensors of any shapes, such as those of detectors and embeddings.

Shape legend: B samples of a batch, K channels of an output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from ptpipe import JSON, StageError
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo
from ptpipe_torch.model.signature import BATCH, TensorSpec
from ptpipe_torch.task.constants import constant
from ptpipe_torch.task.task import Metric, Task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_FIDELITY, _LOSS = "fidelity", "loss"


class TeacherInfo(ArrayInfo):
    """What a teacher returned for a sample as it is stored."""

    def check_augment(self, name: str, names: Sequence[str]) -> None:
        if names:
            raise StageError(
                f"augment: {name} is what the teacher returned for the samples as they are, not for what {names[0]} "
                "makes of them: leave augment out"
            )


class TeacherOutput(BaseModel):
    """One output of the teacher, which its networks have too."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(pattern=r"^[^\W\d]\w*$")
    dtype: Literal["float32", "float64", "int64", "int32", "uint8", "bool"]
    shape: tuple[PositiveInt, ...]
    """Of a sample."""
    channel_axis: NonNegativeInt = 0
    """Of a sample's axes, the one whose channels count alike, whatever their sizes are."""
    std: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Of each channel's values over train; empty: they are no floats, and are not compared."""

    @model_validator(mode="after")
    def _has_statistics(self) -> Self:
        num_channels = self.shape[self.channel_axis : self.channel_axis + 1] or (1,)
        if self.channel_axis > max(0, len(self.shape) - 1) or len(self.std) not in (0, *num_channels):
            raise ValueError("std has a number for each channel of channel_axis")
        return self

    def noise(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of each sample's channels over their variance, float32 (B, K)."""
        errors = (output.float() - target.float()).square()
        if self.shape:
            errors = errors.movedim(1 + self.channel_axis, 1)
        variance_K = constant(self.std, errors.device).square()
        return errors.reshape(len(errors), len(self.std), -1).mean(2) / variance_K


class TeacherOutputs(Task):
    """Networks return what their teacher returns: float32 tensors as targets, by the names of the outputs.

    An output's channels count alike, each in units of its own variance: scores of 0 to 1 as much as boxes in pixels
    beside them. Outputs count alike, too; those that are no floats don't count.

    `fidelity` is 1 less the mean squared error over the variance, 1 at most, of each sample's channels: 1 where the
    outputs are the teacher's, 0 where they are no nearer to it than a constant. (The word as in S. Stanton et al., Does
    Knowledge Distillation Really Work?, arXiv 2106.05945.) The loss is the mean of log(1 + that ratio): nearly the
    ratio itself where it is small, and a channel that is far off, or hardly ever varies, can't outweigh the others.
    """

    every_output: tuple[TeacherOutput, ...] = Field(min_length=1)
    """In the order that networks return them; at least one of them has floats."""

    @model_validator(mode="after")
    def _has_floats(self) -> Self:
        if not self._compared:
            raise ValueError("at least one output has floats")
        return self

    @property
    def _compared(self) -> list[TeacherOutput]:
        return [output for output in self.every_output if output.std]

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {of.name: TeacherInfo(dtype="float32", shape=of.shape) for of in self._compared}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(of.name, of.dtype, (BATCH, *of.shape)) for of in self.every_output)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return Metric(_FIDELITY, higher_is_better=True, is_fraction=True), Metric(_LOSS, higher_is_better=False)

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mean over outputs, and over the channels of each, of the logarithm of 1 plus their noise."""
        return _losses(self._noises(outputs, targets))

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """As `losses`, from a teacher that is run."""
        return self.losses(outputs, teacher_outputs)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        noises = self._noises(outputs, targets)
        return {_FIDELITY: _fidelities(noises).sum(0), _LOSS: _losses(noises).double().sum()}

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        """Fidelity and loss; `per_output` has the fidelity of each output that has floats."""
        fidelities = (sums[_FIDELITY] / num_samples).tolist()
        rows: list[JSON] = [
            {"name": of.name, _FIDELITY: fidelity} for of, fidelity in zip(self._compared, fidelities, strict=True)
        ]
        return {
            _FIDELITY: sum(fidelities) / len(fidelities),
            _LOSS: float(sums[_LOSS]) / num_samples,
            "per_output": rows,
        }

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction`: the first output that has floats; others as `prediction_NAME`; `score`: the fidelity."""
        first, *others = self._compared
        score_B = _fidelities(self._noises(outputs, targets)).mean(1).float()
        kept = {"prediction": outputs[first.name], "score": score_B}
        return kept | {f"prediction_{of.name}": outputs[of.name] for of in others}

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        noises = self._noises(outputs, targets)
        return {_FIDELITY: _fidelities(noises).mean(1), _LOSS: _losses(noises).double()}

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        return {name: totals[name] / num_samples for name in (_FIDELITY, _LOSS)}

    def _noises(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the noise of each output that has floats, in order: float32 (B, K)."""
        return [of.noise(outputs[of.name], targets[of.name]) for of in self._compared]


def _losses(noises: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of each sample, float32 (B,). `noises`: of each output, (B, K)."""
    import torch

    return torch.stack([noise_BK.log1p().mean(1) for noise_BK in noises]).mean(0)


def _fidelities(noises: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fidelity of each sample's outputs: float64, a column for each. `noises`: of each output, (B, K)."""
    import torch

    return torch.stack([1 - noise_BK.double().clamp(max=1).mean(1) for noise_BK in noises], dim=1)
