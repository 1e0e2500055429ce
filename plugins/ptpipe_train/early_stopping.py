"""What early stopping can't monitor: found as soon as the data set is known. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ptpipe import Plan, Problem, nearest
from ptpipe_train.config import EarlyStopping, TrainConfig


def find_fault(rule: EarlyStopping, data: str, num_val: int, metrics: Collection[str]) -> str | None:
    """Return why the metric of val can't be monitored; None where it can. `data`: the data set's name."""
    if not num_val:
        return f"early_stopping needs a val split, and {data} has none"
    if rule.metric in metrics:
        return None
    close = nearest(rule.metric, metrics)
    hint = f"did you mean {close!r}?" if close else f"there are {', '.join(metrics)}"
    return f"early_stopping.metric: {data} has no metric {rule.metric!r} ({hint})"


def early_stopping_problems(plan: Plan, summaries: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[Problem]:
    """Yield the trainings that would refuse their data set, where that is stored.

    `summaries`: of stored outputs, by stage and output.
    """
    for planned in plan.stages:
        rule = planned.config.early_stopping if isinstance(planned.config, TrainConfig) else None
        for data in planned.wiring["data"] if rule else ():
            found = summaries.get(data.stage, {}).get(data.output)
            if (
                rule and found and found.keys() >= {"name", "num_val", "metrics"}
            ):  # a class of one's own may have others
                metrics = [f"val_{name}" for name in found["metrics"]]
                if fault := find_fault(rule, found["name"], found["num_val"], metrics):
                    yield plan.problem(planned.id, fault, "early_stopping", "metric")
