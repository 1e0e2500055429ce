"""Measure size, metrics and latency of several models: the work of `eval.compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ptpipe import Context, StageError, host, nearest
from ptpipe_eval.comparison import Comparison, Row
from ptpipe_eval.graph.companions import count_costs, with_limits
from ptpipe_eval.latency.estimate import MIN_STARTS
from ptpipe_eval.latency.inputs import CellBatches, check_lengths, spread_inputs
from ptpipe_eval.latency.latencies import is_slower
from ptpipe_eval.latency.session import METHOD, Session
from ptpipe_eval.predict import EvalSplit, Evaluation, evaluate_split, progress_callback, select_split
from ptpipe_eval.quality.details import Details, ModelDetails
from ptpipe_eval.quality.paired import ModelSamples, pair
from ptpipe_eval.quality.recorder import SampleRecorder
from ptpipe_eval.quality.targets import targets_sha256
from ptpipe_eval.quality.trivial import trivial_answer
from ptpipe_eval.target import as_on_target, report_exact_sums
from ptpipe_torch import Data, Deployable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ptpipe_eval.config import CompareConfig, EvalLatencyConfig, TimingOptions
    from ptpipe_eval.graph.facts import Peaks


class EvaluatedModel(NamedTuple):
    """What is known of a model before it is timed."""

    row: Row
    samples: ModelSamples
    details: ModelDetails
    targets_NT: npt.NDArray[np.float32] | None
    """What predicted numbers should be; see `Details`."""


def compare_models(config: CompareConfig, ctx: Context, models: Sequence[Deployable], data: Data) -> Comparison:
    """Check all that can be checked without a prediction, then evaluate every model, and time them together."""
    names, (split, baseline) = ctx.input_names["models"], _checked(config, ctx, models, data)
    metrics, primary = data.info.task.metrics, data.info.task.primary_metric
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    evaluated = [
        _evaluated(config, ctx, split, names[position], model, position * len(split.samples))
        for position, model in enumerate(models)
    ]
    counted = count_costs(models, split)
    rows = [replace(one.row, costs=costs) for one, costs in zip(evaluated, counted, strict=True)]
    rows, peaks = timed_rows(config, ctx, split, rows, models, names.index(baseline))
    recorded = [one.samples for one in evaluated]
    trivial = trivial_answer(data.info.task, split.samples.targets, len(split.samples))
    ctx.progress(1, None, "step", doing="computing intervals")
    samples = pair(data.info.task, recorded, names.index(baseline), split.samples.ids.tolist(), ctx.seed)
    samples = replace(samples, targets_sha256=targets_sha256(split.samples, data.info.task))
    comparison = Comparison(
        data.info.name,
        config.split,
        len(split.samples),
        metrics,
        baseline,
        tuple(rows),
        METHOD,
        measured_at,
        samples,
        peaks,
        Details(tuple(one.details for one in evaluated), evaluated[0].targets_NT),
        trivial,
    )
    if trivial and (learned_nothing := trivial.notice(primary, rows, comparison.num_samples)):
        ctx.notice(learned_nothing)
    unknown = [metric.name for metric in metrics if metric.name not in {*samples.right, *samples.bootstraps}]
    if unknown and len(rows) > 1:
        ctx.notice(
            f"no interval for {', '.join(unknown)}: it takes too much memory, some draws of the samples have none, or "
            "these samples can't show one"
        )
    ctx.metric(**{f"{row.name}.{primary.name}": row.metrics[primary.name] for row in rows})
    return comparison


def compare_latency(config: EvalLatencyConfig, ctx: Context, models: Sequence[Deployable], data: Data) -> Comparison:
    """Time every model, and predict nothing else."""
    names, (split, baseline) = ctx.input_names["models"], _checked(config, ctx, models, data)
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [
        Row(name, model.format, model.size_bytes, {}, costs=found)
        for name, model, found in zip(names, models, count_costs(models, split), strict=True)
    ]
    rows, peaks = timed_rows(config, ctx, split, rows, models, names.index(baseline))
    facts = (data.info.name, config.split, len(split.samples))
    return Comparison(*facts, (), baseline, tuple(rows), METHOD, measured_at, peaks=peaks)


def _checked(config: TimingOptions, ctx: Context, models: Sequence[Deployable], data: Data) -> tuple[EvalSplit, str]:
    """Return split and baseline. Raises StageError for a missing baseline, a model that doesn't fit, an empty split."""
    names = ctx.input_names["models"]
    baseline = choose_baseline(config.baseline, names)
    for name, model in zip(names, models, strict=True):
        data.info.check_fit(name, model.signature)
    split = select_split(data, config.split)
    check_lengths(split, config.lengths)
    return split, baseline


def _evaluated(
    config: CompareConfig, ctx: Context, split: EvalSplit, name: str, model: Deployable, num_done: int
) -> EvaluatedModel:
    """Return the model's size, metrics and samples. `num_done`: samples that the models before it have predicted."""
    total = len(ctx.input_names["models"]) * len(split.samples)
    recorder = SampleRecorder(split.data.info.task, len(split.samples))
    evaluation = Evaluation(split.of(model), recorder=recorder)
    on_target = as_on_target(model)
    with on_target.predictor() as predict:
        on_batch = progress_callback(ctx, total, num_done, model=name)
        evaluate_split(name, predict, evaluation, config.batch_size, on_batch)
    figures = evaluation.figures(name)
    if on_target is not model:
        report_exact_sums(ctx, name, model, split, figures)
    for sentence in split.data.info.task.undefined(figures, config.split) if num_done == 0 else ():  # of targets alone
        ctx.notice(sentence)
    values = {metric.name: cast("float", figures[metric.name]) for metric in split.data.info.task.metrics}
    row = Row(name, model.format, model.size_bytes, values)
    return EvaluatedModel(row, recorder.result(), recorder.details(figures), recorder.targets())


def timed_rows(
    options: TimingOptions,
    ctx: Context,
    split: EvalSplit,
    rows: Sequence[Row],
    models: Sequence[Deployable],
    baseline: int,
) -> tuple[list[Row], tuple[Peaks, ...]]:
    """Return the rows with the latencies of their models, measured together, and the machine's peaks.

    `baseline`: its position.
    """
    if not options.batch_sizes:
        return list(rows), ()
    sizes = [(size, length) for size in options.batch_sizes for length in options.lengths or (None,)]
    forms = {model.input_form: split.of(model) for model in models}
    inputs = [
        CellBatches(size, length, {form: spread_inputs(of, size, length) for form, of in forms.items()})
        for size, length in sizes
    ]
    session = Session(inputs, options.threads, options.budget_s, options.precision, ctx.seed, ctx.code, ctx.scratch)

    def on_round(event: Mapping[str, Any]) -> None:
        ctx.progress(int(event["elapsed_s"]), None, "s", latency=f"batch {event['batch_size']}")

    measured = session.measure([row.name for row in rows], models, baseline, on_round)
    rows = [
        replace(row, latencies=own.latencies, start_up=own.start_up) for row, own in zip(rows, measured, strict=True)
    ]
    rows, peaks = with_limits(rows, models, split)
    if disturbance := describe_disturbance(rows):
        ctx.notice(f"{disturbance}; --fresh {ctx.stage_id} measures again")
    if slower := describe_slower_int8(rows, rows[baseline]):
        ctx.notice(slower)
    return rows, peaks


def describe_disturbance(rows: Sequence[Row]) -> str | None:
    """Name the latencies that can't be compared; None if all can."""
    cells = dict.fromkeys(cell.label for row in rows for cell in row.latencies if cell.speed == "unmeasurable")
    if not cells:
        return None
    return (
        f"latency at {'; '.join(cells)}: other programs used the processors, or the budget was too short for "
        f"{MIN_STARTS} starts of every model, so no model can be called faster than another"
    )


def describe_slower_int8(rows: Sequence[Row], baseline: Row) -> str | None:
    """Name the models that are slower than the float model that the same engine runs; None if there are none.

    Of each, the batch size and number of threads where it is slowest. The table says it where the float model is the
    baseline.
    """
    found = []
    for row in rows:
        engine = row.format.partition(" ")[0]
        floats = [other for other in rows if other.format == f"{engine} float32"]
        if len(floats) != 1 or floats[0] in (row, baseline):  # of several, one may be of another network
            continue
        slower = [pair for pair in zip(row.latencies, floats[0].latencies, strict=True) if is_slower(*pair)]
        if slower:
            own, reference = max(slower, key=lambda pair: pair[0].ratio / pair[1].ratio)
            ratio = own.ratio / reference.ratio
            found.append(f"{row.name} takes {ratio:.2f}x the time of {floats[0].name} ({own.label})")
    if not found:
        return None
    flags = host.cpu_flags()
    reason = ", which has no VNNI" if flags is not None and flags.isdisjoint(host.VNNI_FLAGS) else ""
    return f"int8 is slower than float on this machine{reason}: {'; '.join(found)}"


def choose_baseline(configured: str | None, names: Sequence[str]) -> str:
    """Return the configured baseline or the first model. Raises StageError if it is missing or a model repeats."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise StageError(f"models lists {', '.join(repeated)} more than once")
    baseline = configured or names[0]
    if baseline not in names:
        guess = nearest(baseline, names)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise StageError(f"baseline {baseline!r} is not among the models: {', '.join(names)}{hint}")
    return baseline
