"""Measure size, metrics and latency of several models: the work of `eval.compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from ptpipe import Context, StageError, host, nearest
from ptpipe_eval import timing
from ptpipe_eval.comparison import Comparison, Latency, Row, Threads
from ptpipe_eval.predict import EvalSplit, Evaluation, evaluate_split, progress_callback, select_split
from ptpipe_eval.quality.paired import ModelSamples, pair
from ptpipe_eval.quality.recorder import SampleRecorder
from ptpipe_torch import Data, Deployable, Predictor

if TYPE_CHECKING:
    from ptpipe_eval.config import CompareConfig

_MAX_WAITED_FRACTION = 0.1
"""Of the time, spent waiting for a processor: above it a latency is not the model's alone."""


@dataclass(frozen=True)
class ModelTimer:
    """Evaluates and times models one after another, each on the same inputs."""

    config: CompareConfig
    ctx: Context
    split: EvalSplit
    inputs: Mapping[int, list[timing.Inputs]]
    """Inputs to time predictions on, by batch size."""
    num_models: int
    samples: list[ModelSamples] = field(default_factory=list)
    """Of the models evaluated so far."""

    def row(self, position: int, name: str, model: Deployable) -> Row:
        """Evaluate the model and time every cell; one predictor is created per number of threads.

        `position` counts the models before this one; `name` is the model's reference in the manifest.
        """
        with model.predictor() as predict:
            done = position * len(self.split.samples)
            on_batch = progress_callback(self.ctx, self._num_samples, done, model=name)
            recorder = SampleRecorder(self.split.data.info.task, len(self.split.samples))
            evaluation = Evaluation(self.split, recorder=recorder)
            evaluate_split(name, predict, evaluation, self.config.batch_size, on_batch)
            cells = self._cells(predict, "all", host.num_threads()) if "all" in self.config.threads else []
        if "one" in self.config.threads and self.inputs:
            with model.predictor(1) as predict:
                cells = self._cells(predict, "one", 1) + cells
        self.samples.append(recorder.result())
        figures = evaluation.figures()
        values = {metric.name: cast("float", figures[metric.name]) for metric in self.split.data.info.task.metrics}
        return Row(name, model.format, model.size_bytes, values, tuple(cells))

    def _cells(self, predict: Predictor, threads: Threads, num_threads: int) -> list[Latency]:
        cells = []
        for batch_size, inputs in self.inputs.items():
            runs = timing.measure(predict, inputs, self.config.budget_s)
            cells.append(timing.summarize(runs, batch_size, threads, num_threads))
        return cells

    @property
    def _num_samples(self) -> int:
        return self.num_models * len(self.split.samples)


def compare_models(config: CompareConfig, ctx: Context, models: Sequence[Deployable], data: Data) -> Comparison:
    """Check all that can be checked without a prediction, then measure every model."""
    names = ctx.input_names["models"]
    baseline = choose_baseline(config, names)
    for name, model in zip(names, models, strict=True):
        data.info.check_fit(name, model.signature)
    split = select_split(data, config.split)
    inputs = {size: timing.spread_inputs(split, size) for size in config.batch_sizes}
    timer = ModelTimer(config, ctx, split, inputs, len(models))
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [timer.row(position, names[position], model) for position, model in enumerate(models)]
    metrics = data.info.task.metrics
    samples = pair(data.info.task, timer.samples, names.index(baseline), split.samples.ids.tolist(), ctx.seed)
    comparison = Comparison(
        data.info.name,
        config.split,
        len(split.samples),
        metrics,
        baseline,
        tuple(rows),
        timing.METHOD,
        measured_at,
        samples,
    )
    unknown = [metric.name for metric in metrics if metric.name not in {*samples.right, *samples.bootstraps}]
    if unknown and len(rows) > 1:
        ctx.notice(
            f"no interval for {', '.join(unknown)}: it takes too much memory, or some draws of the samples have none"
        )
    ctx.metric(**{f"{row.name}.{metrics[0].name}": row.metrics[metrics[0].name] for row in rows})
    if contention := describe_cpu_contention(rows):
        ctx.notice(f"{contention}; --fresh {ctx.stage_id} measures again")
    return comparison


def describe_cpu_contention(rows: Sequence[Row]) -> str | None:
    """Describe how much other programs disturbed the measurements; None if hardly."""
    waits = [(cell.waited_fraction or 0.0, row.name, cell.label) for row in rows for cell in row.latencies]
    disturbed = [wait for wait in waits if wait[0] > _MAX_WAITED_FRACTION]
    if not disturbed:
        return None
    fraction, name, label = max(disturbed)
    return (
        f"{len(disturbed)} of {len(waits)} latencies were measured while other programs used the processor, up to "
        f"{100 * fraction:.0f} % of the time ({name}, {label}), and may be too high"
    )


def choose_baseline(config: CompareConfig, names: Sequence[str]) -> str:
    """Return the configured baseline or the first model. Raises StageError if it is missing or a model repeats."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise StageError(f"models lists {', '.join(repeated)} more than once")
    baseline = config.baseline or names[0]
    if baseline not in names:
        guess = nearest(baseline, names)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise StageError(f"baseline {baseline!r} is not among the models: {', '.join(names)}{hint}")
    return baseline
