"""Put artifacts side by side: the work of `eval.compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ptpipe import Context, StageError, nearest
from ptpipe_eval import timing
from ptpipe_eval.classification import Sitting, check_fit, news, open_sitting, predict_split
from ptpipe_eval.comparison import Comparison, Latency, Row, Threads
from ptpipe_eval.metrics import count_correct
from ptpipe_torch import Data, Deployable, Predictor
from ptpipe_torch.runtime import num_cpus

if TYPE_CHECKING:
    from ptpipe_eval import CompareConfig

_DISTURBED_SHARE = 0.1
"""Of the time, spent waiting for a processor: above it a latency is not the model's own."""


@dataclass(frozen=True)
class Bench:
    """Where models are examined and timed, one after another."""

    config: CompareConfig
    ctx: Context
    sitting: Sitting
    inputs: Mapping[int, list[timing.Images]]
    """For each batch size, what is predicted while the clock runs."""
    num_models: int

    def row(self, position: int, name: str, model: Deployable) -> Row:
        """Count the right answers and time every cell; a predictor is made once for each number of threads."""
        with model.predictor() as predict:
            on_batch = news(self.ctx, self._total, position * len(self.sitting.samples), model=name)
            logits_NK = predict_split(name, predict, self.sitting, self.config.batch_size, on_batch)
            cells = self._cells(predict, "all", num_cpus()) if "all" in self.config.threads else []
        if "one" in self.config.threads and self.inputs:
            with model.predictor(1) as predict:
                cells = self._cells(predict, "one", 1) + cells
        num_correct = count_correct(logits_NK, self.sitting.samples.labels_N)
        return Row(name, model.format, model.size_bytes, num_correct, tuple(cells))

    def _cells(self, predict: Predictor, threads: Threads, num_threads: int) -> list[Latency]:
        cells = []
        for batch_size, inputs in self.inputs.items():
            runs = timing.measure(predict, inputs, self.config.budget_s)
            cells.append(timing.summarize(runs, batch_size, threads, num_threads))
        return cells

    @property
    def _total(self) -> int:
        return self.num_models * len(self.sitting.samples)


def compare_models(config: CompareConfig, ctx: Context, models: Sequence[Deployable], data: Data) -> Comparison:
    """Check everything that can be checked without predicting, then fill the table."""
    names = ctx.input_names["models"]
    baseline = choose_baseline(config, names)
    for name, model in zip(names, models, strict=True):
        check_fit(name, model, data)
    sitting = open_sitting(data, config.split)
    inputs = {size: timing.spread_inputs(sitting, size) for size in config.batch_sizes}
    bench = Bench(config, ctx, sitting, inputs, len(models))
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [bench.row(position, names[position], model) for position, model in enumerate(models)]
    comparison = Comparison(
        data.info.name, config.split, len(sitting.samples), baseline, tuple(rows), timing.METHOD, measured_at
    )
    ctx.metric(**{f"{row.name}.accuracy": comparison.accuracy(row) for row in rows})
    if crowding := describe_crowding(rows):
        ctx.notice(f"{crowding}; --fresh {ctx.stage_id} measures again")
    return comparison


def describe_crowding(rows: Sequence[Row]) -> str | None:
    """Say how far other programs disturbed the clock; None where they hardly did."""
    waits = [(cell.waited_share or 0.0, row.name, cell.label) for row in rows for cell in row.latencies]
    disturbed = [wait for wait in waits if wait[0] > _DISTURBED_SHARE]
    if not disturbed:
        return None
    share, name, label = max(disturbed)
    return (
        f"{len(disturbed)} of {len(waits)} latencies were measured while other programs held the processor, up to "
        f"{100 * share:.0f} % of the time ({name}, {label}), and may be too high"
    )


def choose_baseline(config: CompareConfig, names: Sequence[str]) -> str:
    """The named baseline, or the first model. Raises StageError where it isn't among the models, or one is twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise StageError(f"models lists {', '.join(twice)} more than once")
    baseline = config.baseline or names[0]
    if baseline not in names:
        guess = nearest(baseline, names)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise StageError(f"baseline {baseline!r} is not among the models: {', '.join(names)}{hint}")
    return baseline
