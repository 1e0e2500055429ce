"""Models that learned nothing: the targets of a split alone say as much as they do. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptpipe import JSON
from ptpipe_eval.quality.gates import metric_text
from ptpipe_torch.task.task import MIN_TRIVIAL_SAMPLES

if TYPE_CHECKING:
    from ptpipe_eval.comparison import Row
    from ptpipe_torch import Column, Metric, Task


@dataclass(frozen=True)
class TrivialAnswer:
    """The best answer that looks at no input."""

    answer: str
    """In words: `the most frequent class`."""
    value: float
    """Its primary metric on the samples that are compared."""

    def to_json(self, metric: Metric, rows: Sequence[Row]) -> dict[str, JSON]:
        """Return the fields, and as `no_better` the rows that are not better. `metric`: the primary one."""
        return {"answer": self.answer, "value": self.value, "no_better": [*self.no_better(metric, rows)]}

    def no_better(self, metric: Metric, rows: Sequence[Row]) -> list[str]:
        """Return the names of the rows that are not better than this."""
        return [row.name for row in rows if metric.drop(row.metrics[metric.name], self.value) >= 0]

    def notice(self, metric: Metric, rows: Sequence[Row], num_samples: int) -> str | None:
        """Name the models that are not better; None where all are. `num_samples`: that were compared."""
        names = self.no_better(metric, rows)
        if not names:
            return None
        who = ", ".join(names) + (" is" if len(names) == 1 else " are")
        return (
            f"{'no model is' if len(names) == len(rows) else who + ' no'} better than always answering {self.answer}: "
            f"{metric.name} {metric_text(metric, self.value, num_samples)}"
        )


def trivial_answer(task: Task, targets: Mapping[str, Column], num_samples: int) -> TrivialAnswer | None:
    """Return the best answer that looks at no input; None where there are few samples, or it isn't known."""
    found = None if num_samples < MIN_TRIVIAL_SAMPLES else task.trivial_answer(targets)
    return None if found is None else TrivialAnswer(found[0], float(found[1]))
