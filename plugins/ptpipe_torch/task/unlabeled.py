"""No targets: networks may return anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ptpipe import JSON, StageError
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.task.task import Metric, Task

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class Unlabeled(Task):
    """Inputs alone, enough to quantize, export and time networks of any outputs: detectors, embeddings, generators.

    There is nothing to learn from and no metric. What is kept of each sample are the outputs.
    """

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        return {}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Empty: any."""
        return ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return ()

    @property
    def primary_metric(self) -> NoReturn:
        """Raises StageError: there is none."""
        raise StageError(
            "the data set is unlabeled: there is no metric that a model could be judged by. data.teacher_outputs makes "
            "targets of a float model's outputs; eval.latency compares sizes and latencies alone"
        )

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> NoReturn:
        """Raises StageError: there is nothing to learn."""
        raise StageError(
            "the data set is unlabeled: there is no target to learn. data.teacher_outputs makes targets of a model's "
            "outputs; else choose another task"
        )

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        return {}

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The outputs, by name."""
        return dict(outputs)
