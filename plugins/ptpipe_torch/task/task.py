"""What a data set asks of a model: losses, metrics, predictions. Importing this imports neither torch nor numpy.

Shape legend: B samples of a batch, R resamples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from ptpipe import JSON, StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.facts import Facts
from ptpipe_torch.model.signature import Meanings, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

MIN_TRIVIAL_SAMPLES = 50
"""Among fewer, a network that learned something may by chance be right no more often than a trivial answer."""
_DIGITS = 12
"""Of a difference: beyond them is what the rounding of its operands leaves, 0.9931 - 0.9901 = 0.0030000000000000027."""


def meaning_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes, labels or targets; nothing where they are their numbers, as if they had none."""
    return () if all(name == str(number) for number, name in enumerate(names)) else tuple(names)


def drop_name(*, is_fraction: bool) -> str:
    """Return what a metric's difference to a baseline is called: `drop` of a fraction, in points, else `worse_by`."""
    return "drop" if is_fraction else "worse_by"


@dataclass(frozen=True)
class Metric:
    """One figure of a model on a split."""

    name: str
    """`accuracy`: in `Task.figures`, in comparisons, and with `val_` in front among the metrics of a training."""
    higher_is_better: bool
    is_fraction: bool = False
    """Whether it lies between 0 and 1 and is shown in percent."""

    @property
    def drop_name(self) -> str:
        """What the difference to a baseline is called."""
        return drop_name(is_fraction=self.is_fraction)

    def drop(self, value: float, baseline: float) -> float:
        """Return by how much `value` is worse than `baseline`; negative where it is better."""
        return round(baseline - value if self.higher_is_better else value - baseline, _DIGITS)


class Task(Facts, ABC):
    """What a data set asks of a model, in one class; its fields are the facts that are stored with the data set.

    Training, evaluation and gates are written against these methods alone. A class of one's own is stored by its name,
    and found in its plugin. Tensors of `outputs` and `targets` are on one device, with a row for each sample.
    """

    @property
    @abstractmethod
    def targets(self) -> Mapping[str, ColumnInfo]:
        """The columns that a split has as targets, by name."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What a network returns; empty: anything."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics, each a single number. The first one is the primary metric."""

    @property
    def class_scores(self) -> Mapping[str, int]:
        """The outputs that have scores of classes, the highest of which is predicted, and the axis of the classes."""
        return {}

    @property
    def probability_functions(self) -> Mapping[str, Literal["softmax", "sigmoid"]]:
        """What makes probabilities of outputs, by their names: by default a softmax of scores of classes."""
        return dict.fromkeys(self.class_scores, "softmax")

    @property
    def meanings(self) -> Meanings:
        """What outputs stand for, by their names: the classes. Names that are numbers, 0, 1, 2, ..., say nothing."""
        return {}

    def summary(self) -> dict[str, JSON]:
        """Return what a data set's summary says of the task."""
        return {}

    @property
    def output_scale(self) -> tuple[float, ...]:
        """What a network's last layer is multiplied by where its natural unit is not the target's; empty: nothing.

        A number for each target, the second axis of the outputs.
        """
        return ()

    @property
    def output_shift(self) -> tuple[float, ...]:
        """What is added after `output_scale`; empty: nothing."""
        return ()

    def in_natural_units(self, output: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `output`, (B, T, ...), before `output_scale` and `output_shift`: its targets are comparable."""
        import numpy as np

        if not self.output_scale:
            return output
        scale, shift = (
            np.array(numbers_T).reshape(-1, *(1,) * (output.ndim - 2))
            for numbers_T in (self.output_scale, self.output_shift)
        )
        natural: npt.NDArray[Any] = (output - shift) / scale
        return natural

    @abstractmethod
    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of each sample, float32 of shape (B,). A step's loss is their mean over all its batches."""

    @abstractmethod
    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what `figures` is computed from: float64 or int64 tensors that add up over batches and workers."""

    @abstractmethod
    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        """Return a number for each of `metrics` that sums give, and whatever else a report may show.

        `sums`: those of all samples, by name. `num_samples`: how many these are; not 0.
        """

    def label_scores(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return how sure the outputs are of each label and, 1 or 0, whether a sample has it: float32 (B, L, 2).

        By default None. `roc_auc`, `roc_auc_ovr` (of classes) and `average_precision`, where they are among `metrics`,
        are computed from all samples' together: means over the L labels. They are gathered from batches and workers,
        not added.
        """
        return None

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of the L labels of `label_scores`, for the curves of a report; by default none."""
        return ()

    @abstractmethod
    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what is kept of each sample, with B rows: its `prediction`, its `score` (higher is better), others.

        `labels`, int64 (B,), are numbers of classes: comparisons are made for each class too.
        """

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return of each sample what `metric_values` is computed from, with B rows: a comparison draws samples from it.

        What is named as a metric is all that this metric is computed from; where it is bool, the metric is the fraction
        of the samples that have it. By default `sums` of each sample alone: right for any task, but slow. A task that
        replaces this one replaces `metric_values` too.
        """
        import torch

        num_samples = len(next(iter(outputs.values())))
        alone = [
            self.sums(*({name: tensor[i : i + 1] for name, tensor in side.items()} for side in (outputs, targets)))
            for i in range(num_samples)
        ]
        return {name: torch.stack([sums[name] for sums in alone]) for name in alone[0]}

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Return each of `metrics` that sums give, (R,), of several draws of `num_samples` samples.

        `totals`: those of what `sample_sums` returns, (R, ...). By default those of `figures`.
        """
        import numpy as np

        num_draws = len(next(iter(totals.values())))
        found = [self.figures({name: of[i] for name, of in totals.items()}, num_samples) for i in range(num_draws)]
        names = [metric.name for metric in self.metrics if metric.name in found[0]]
        return {name: np.array([figures[name] for figures in found], float) for name in names}

    def worst_sums(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return what each sample adds at its worst, by the names of metrics: `sample_sums` of the worst outputs.

        `sums`: those of a model's samples, with N rows. Where hardly a sample differs between two models, they don't
        show what a mistake costs, and a comparison takes the worst. By default none is known: a metric that is a
        fraction is taken to be a mean of the samples' rows if these are single numbers; else it may drop by all of it.
        """
        return {}

    def target_bytes(
        self, targets: Mapping[str, Column], order_N: npt.NDArray[np.int64]
    ) -> Iterator[bytes | memoryview] | None:
        """Return the targets of samples as bytes that other samples of the data set don't change; None: there are none.

        `targets`: the columns of a split. `order_N`: which samples, in which order. A model that was accepted is
        compared with others only where these are the same. By default the values, of targets that are not padded.
        """
        from ptpipe_torch.task.target_bytes import bytes_of

        is_padded = any(column.lengths is not None for column in targets.values())
        return None if is_padded else bytes_of(targets, order_N)

    def undefined(self, figures: Mapping[str, JSON], split: str) -> list[str]:
        """Return sentences that name what `split` has none of, for metrics to say something; by default none.

        `figures`: those of all its samples. No drop of a metric can be shown where it has the same value whatever is
        predicted.
        """
        return []

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:  # any value may be right
        """Raise StageError where one of `targets`, columns of `split`, has a value that it can't have.

        `Data` puts the first such sample's id in front: it finds it by checking columns of fewer samples.
        """

    def trivial_answer(self, targets: Mapping[str, Column]) -> tuple[str, float] | None:
        """Return the best answer that looks at no input, in words, and its primary metric; by default None: unknown.

        `targets`: the columns of a split that has samples.
        """
        return None

    def cause_of_errors(self, figures: Mapping[str, JSON]) -> str | None:
        """Return what the `figures` of a network that learned nothing point to, in words; by default None: unknown."""
        return None

    def with_label_smoothing(self, label_smoothing: float) -> Self:
        """Return the task with the fraction `label_smoothing` of a label spread over all classes.

        Raises StageError where no target is one class of several.
        """
        if label_smoothing:
            raise StageError(
                "label_smoothing is for one class of several for each sample, pixel or token, and the task "
                f"{type(self).__name__} has none: leave it out"
            )
        return self

    @property
    def can_be_distilled(self) -> bool:
        """Whether the task has `teacher_losses`."""
        return type(self).teacher_losses is not Task.teacher_losses

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """Return how far each sample's `outputs` are from `teacher_outputs`, float32 of shape (B,).

        `targets`: decide what of a sample counts. `temperature`: divides scores of classes or labels. By default
        StageError: the task can't be distilled.
        """
        raise StageError(f"the task {type(self).__name__} can't be distilled: it has no measure of a teacher's outputs")

    def with_source_functions(self, functions: Sequence[str]) -> Self:
        """Return the task, which may call `functions` of the user's: see `ptpipe.Artifact`; by default ignored."""
        return self

    @property
    def primary_metric(self) -> Metric:
        """The metric that models are compared by."""
        return self.metrics[0]


def exact_sums(
    task: Task, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return `Task.sums` as float64 or int64: added up over batches, float32 would lose digits, and int32 overflow."""
    sums = task.sums(outputs, targets)
    return {name: of.double() if of.is_floating_point() else of.long() for name, of in sums.items()}
