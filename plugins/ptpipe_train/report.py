"""What trainings add to a run's report: their curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptpipe import Plan, RunFinished, Section, StageFinished
from ptpipe.sections import Block, Facts, Mark, Plot, Point, Series, Text, Topic
from ptpipe_train.config import TrainConfig

_LOSSES = ("train_loss", "val_loss")
_FACTS = ("epochs_done", "num_steps", "samples_per_s", "peak_lr", "schedule", "precision", "device", "best_epoch")


def report_sections(plan: Plan, run: RunFinished) -> Iterator[Section]:
    """Yield the curves of every training that ended."""
    for stage in run.stages:
        if isinstance(plan[stage.stage_id].config, TrainConfig):
            history = [row for row in _list(stage.metrics.get("history")) if isinstance(row, Mapping)]
            if history:
                blocks = tuple(_blocks(stage, history))
                yield Section(f"Training: {stage.stage_id}", blocks, Topic.TRAINING, stage.stage_id)


def _blocks(stage: StageFinished, history: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    marks = tuple(Mark("restarted", "x", epochs) for epochs in _list(stage.metrics.get("restarted_at_epochs")))
    names = [name for name in history[0] if name not in ("epoch", "lr")]
    # The first metric that val has is the task's primary one.
    metric = next((name for name in names if name not in _LOSSES), None)
    if len(history) > 1:
        yield _curves("Loss", history, [name for name in _LOSSES if name in names], marks)
        if metric:
            yield _curves(_words(metric), history, [metric], marks)
    else:
        yield Text("One epoch: there is no curve to draw.")
        yield Facts(tuple((name, history[0][name]) for name in names))
    yield Facts(tuple((name, value) for name in _FACTS if (value := stage.metrics.get(name)) is not None))  # type: ignore[misc]


def _curves(title: str, history: Sequence[Mapping[str, Any]], names: Sequence[str], marks: tuple[Mark, ...]) -> Plot:
    series = (
        Series(_words(name), tuple(Point(row["epoch"], row[name]) for row in history if name in row)) for name in names
    )
    return Plot(title.capitalize(), "epoch", title.lower(), tuple(series), marks)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
