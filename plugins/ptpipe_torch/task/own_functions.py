"""A task whose loss, or whose primary metric, is a function in a file of the user's.

Shape legend: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

from ptpipe import JSON, StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.model.function_ref import FunctionRef
from ptpipe_torch.model.signature import Meanings, TensorSpec
from ptpipe_torch.task.task import Metric, Task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_METRIC = "own_metric"
"""Of the sums."""


class OwnFunction(BaseModel):
    """A function `(outputs, targets) -> (B,)` in a file: see `FunctionRef`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    address: str
    source: str

    @property
    def name(self) -> str:
        """The function's own."""
        return self.address.rpartition(":")[2]


class OwnFunctionsTask(Task):
    """A built-in task with the user's loss, primary metric, or both; everything else is the task's.

    The functions get tensors where the task has one output or target, else mappings by name; outputs in float32.
    """

    base: dict[str, Any]
    """The task, as it is stored."""
    loss: OwnFunction | None = None
    metric: OwnFunction | None = None
    """Its mean over the samples is the primary metric, of the function's name."""
    higher_is_better: bool = True

    _source_functions: tuple[str, ...] = PrivateAttr(())
    _found: dict[str, Callable[..., Any]] = PrivateAttr(default_factory=dict)
    _task: list[Task] = PrivateAttr(default_factory=list)

    def with_source_functions(self, functions: Sequence[str]) -> Self:
        other = self.model_copy()
        other._source_functions, other._found = tuple(functions), {}
        return other

    @property
    def task(self) -> Task:
        """The built-in task."""
        if not self._task:
            self._task.append(Task.from_json(self.base))
        return self._task[0]

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return self.task.targets

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.task.outputs

    @property
    def metrics(self) -> tuple[Metric, ...]:
        own = () if self.metric is None else (Metric(self.metric.name, self.higher_is_better),)
        return (*own, *self.task.metrics)

    @property
    def class_scores(self) -> Mapping[str, int]:
        return self.task.class_scores

    @property
    def probability_functions(self) -> Mapping[str, Literal["softmax", "sigmoid"]]:
        return self.task.probability_functions

    def summary(self) -> dict[str, JSON]:
        return self.task.summary()

    @property
    def meanings(self) -> Meanings:
        return self.task.meanings

    @property
    def output_scale(self) -> tuple[float, ...]:
        return self.task.output_scale

    @property
    def output_shift(self) -> tuple[float, ...]:
        return self.task.output_shift

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The user's, or the task's."""
        return self.task.losses(outputs, targets) if self.loss is None else self._call(self.loss, outputs, targets)

    @property
    def can_be_distilled(self) -> bool:
        return self.task.can_be_distilled

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """The task's, whatever its loss is."""
        return self.task.teacher_losses(outputs, teacher_outputs, targets, temperature)

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sums = self.task.sums(outputs, targets)
        if self.loss is not None:
            sums["loss"] = self.losses(outputs, targets).double().sum()
        if self.metric is not None:
            sums[_METRIC] = self._call(self.metric, outputs, targets).double().sum()
        return sums

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        figures: dict[str, JSON] = {}
        if self.metric is not None:
            figures[self.metric.name] = float(sums[_METRIC]) / num_samples
        return figures | self.task.figures({name: of for name, of in sums.items() if name != _METRIC}, num_samples)

    def label_scores(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        return self.task.label_scores(outputs, targets)

    @property
    def score_names(self) -> tuple[str, ...]:
        return self.task.score_names

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        samples = self.task.samples(outputs, targets)
        if self.metric is not None:
            values_B = self._call(self.metric, outputs, targets)
            samples["score"] = values_B if self.higher_is_better else -values_B
        return samples

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        sums = self.task.sample_sums(outputs, targets)
        if self.loss is not None:
            sums["loss"] = self.losses(outputs, targets).double()
        if self.metric is not None:
            sums[self.metric.name] = self._call(self.metric, outputs, targets).double()
        return sums

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        if self.metric is None:
            return self.task.metric_values(totals, num_samples)
        others = {name: total for name, total in totals.items() if name != self.metric.name}
        return {
            self.metric.name: totals[self.metric.name] / num_samples,
            **self.task.metric_values(others, num_samples),
        }

    def worst_sums(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The task's: nothing is known of the user's metric."""
        return self.task.worst_sums(sums)

    def target_bytes(
        self, targets: Mapping[str, Column], order_N: npt.NDArray[np.int64]
    ) -> Iterator[bytes | memoryview] | None:
        return self.task.target_bytes(targets, order_N)

    def undefined(self, figures: Mapping[str, JSON], split: str) -> list[str]:
        """What is missing for the task's metrics, unless models are compared by the user's."""
        return self.task.undefined(figures, split) if self.metric is None else []

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:
        self.task.check_targets(split, targets)

    def trivial_answer(self, targets: Mapping[str, Column]) -> tuple[str, float] | None:
        """The task's, unless the primary metric is the user's."""
        return self.task.trivial_answer(targets) if self.metric is None else None

    def with_label_smoothing(self, label_smoothing: float) -> Self:
        if label_smoothing and self.loss is not None:
            raise StageError(f"label_smoothing: the loss is {self.loss.name}, a function of your own: smooth there")
        smoothed = self.task.with_label_smoothing(label_smoothing)
        other = self.model_copy(update={"base": smoothed.to_json()})
        other._task = [smoothed]
        return other

    def _call(
        self, function: OwnFunction, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return what the function says of each sample, float32. Raises StageError where that is not (B,) numbers."""
        import torch

        if function.address not in self._found:
            reference = FunctionRef(function.address, {}, function.source, self._source_functions)
            self._found[function.address] = reference.resolve("function of outputs and targets")
        exact = {name: of.float() if of.is_floating_point() else of for name, of in outputs.items()}  # of bf16 or fp16
        given = (next(iter(side.values())) if len(side) == 1 else dict(side) for side in (exact, targets))
        values_B = self._found[function.address](*given)
        num_samples = len(next(iter(outputs.values())))
        if not isinstance(values_B, torch.Tensor) or values_B.shape != (num_samples,):
            found = f"a tensor of shape {tuple(values_B.shape)}" if isinstance(values_B, torch.Tensor) else "no tensor"
            raise StageError(
                f"{function.address} returned {found} for {num_samples} samples: return a number for each, of shape "
                f"({num_samples},), such as a loss with reduction='none' has"
            )
        return values_B.float()
