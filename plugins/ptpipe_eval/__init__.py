"""Evaluate models, compare them, gate them and select among them: eval.*, gate.*, select.*."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ptpipe import JSON, Context, Stage, StageConfig, StageError, Verdict, hookimpl, stage
from ptpipe_eval.comparison import Comparison, Row
from ptpipe_eval.config import (
    AccuracyConfig,
    BaselineOption,
    CompareConfig,
    EvalLatencyConfig,
    LatencyConfig,
    PredictConfig,
    QualityConfig,
    SelectConfig,
    SizeConfig,
)
from ptpipe_eval.latency.latencies import Latency, StartUp
from ptpipe_torch import Data, Deployable, Model, Predictions, Selected

if TYPE_CHECKING:
    from ptpipe import Artifact, Plan, Problem, RunFinished, Section

__all__ = ["Comparison", "Latency", "Row", "StartUp"]

_RUNTIMES = ("torch", "onnxruntime")
_STATISTICS = ("numpy", "scipy")


@stage("eval.predict", packages=_RUNTIMES, renamed_from="eval.classify")
def eval_predict(config: PredictConfig, ctx: Context, model: Deployable, data: Data) -> Predictions:
    """Predict a split, and compute the metrics of the data set's task.

    Those of a classification are accuracy, top-5 accuracy, loss, per-class precision and recall, and the confusion
    matrix. Float, int8 and ONNX models share one code path. Prediction and score of every sample are kept by id, and
    what else the task keeps (the logits of a classification). `ptpipe get RUN STAGE` copies `predictions.csv`: id, what
    is known, prediction and score of each sample; of at most 100 classes or labels also `probability_NAME`, softmax or
    sigmoid of the logits. Of tokens, maps and plain outputs it copies `predictions.safetensors`, whose rows are in the
    order of the ids in `predictions.json`. Fails if model and data set do not fit, the
    split is empty, or an output is not finite (the error names the sample).
    """
    from ptpipe_eval.predict import predict_split

    return predict_split(config, ctx, model, data)


@stage("eval.compare", per_machine=True, packages=_RUNTIMES + _STATISTICS)
def eval_compare(config: CompareConfig, ctx: Context, models: Sequence[Deployable], data: Data) -> Comparison:
    """Compare models: format, size, the task's primary metric, its drop against a baseline, and latency.

    Rows have the names of the models in `needs`. Latency is the wall time of one prediction on real samples, from
    input in memory to output in memory, after a warm-up. All models are measured together, each in a process of its
    own, in rounds that visit them in random order, beside a second copy of the baseline: what differs less than two
    copies of one model is noise. Ratios have intervals, and are valid for the measuring machine only. Beside them stand
    compressed size, multiply-accumulates, operators, and the least time that this machine could take for them.
    """
    from ptpipe_eval.compare import compare_models

    return compare_models(config, ctx, models, data)


@stage("eval.latency", per_machine=True, packages=_RUNTIMES + _STATISTICS)
def eval_latency(config: EvalLatencyConfig, ctx: Context, models: Sequence[Deployable], data: Data) -> Comparison:
    """Compare the latency and size of models, without their quality, as eval.compare does.

    The table that it returns is for gate.latency and gate.size.
    """
    from ptpipe_eval.compare import compare_latency

    return compare_latency(config, ctx, models, data)


def _baseline_digest(config: BaselineOption) -> JSON:
    """Return the digest of the file that a gate reads."""
    file = Path(config.baseline_file).expanduser() if config.baseline_file else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None


def _missing_baseline(config: BaselineOption) -> Iterable[str]:
    if config.baseline_file and not Path(config.baseline_file).expanduser().is_file():
        yield f"there is no file {config.baseline_file}: `ptpipe baseline accept` writes one"


@stage("gate.accuracy", packages=_STATISTICS, fingerprint=_baseline_digest, preflight=_missing_baseline)
def gate_accuracy(config: AccuracyConfig, ctx: Context, comparison: Comparison) -> Verdict:
    """Refuse a classifier that loses too much accuracy against the baseline, or has too little.

    `max_drop` is a test on the paired samples: it passes where the drop is below it, and refuses where the drop is
    above it, at the given confidence (Tango's score interval). Where the samples are too few for either, the gate is
    undecided, and says how many it would take. A refusal ends the run with exit code 3 after the other stages.
    """
    from ptpipe_eval.quality.gates import judge_accuracy

    return judge_accuracy(config, comparison)


@stage("gate.quality", packages=_STATISTICS, fingerprint=_baseline_digest, preflight=_missing_baseline)
def gate_quality(config: QualityConfig, ctx: Context, comparison: Comparison) -> Verdict:
    """Refuse a model that is too much worse than the baseline in a metric of the task, or beyond a limit.

    The task knows whether higher is better. `max_drop` is a test on the paired samples, as in gate.accuracy; where the
    metric is no fraction of samples (F1, IoU, R2, perplexity), by a bootstrap. A refusal ends the run with exit code 3
    after the other stages.
    """
    from ptpipe_eval.quality.gates import judge_quality

    return judge_quality(config, comparison)


@stage("gate.size")
def gate_size(config: SizeConfig, ctx: Context, comparison: Comparison) -> Verdict:
    """Refuse a model whose file is too large.

    The limit itself passes. A refusal ends the run with exit code 3 after the other stages.
    """
    from ptpipe_eval.gates import judge_size

    return judge_size(config, comparison)


@stage("gate.latency")
def gate_latency(config: LatencyConfig, ctx: Context, comparison: Comparison) -> Verdict:
    """Refuse a model whose latency is too high, by the confidence interval that was measured.

    It passes where the whole interval is within the limit, and refuses where all of it is beyond: a refusal ends the
    run with exit code 3 after the other stages. Where a busy machine leaves no interval, `max_ms` passes if even the
    slowest block of calls is within it. Otherwise, or if the comparison does not contain the latency, the gate is
    undecided.
    """
    from ptpipe_eval.latency.gate import judge_latency

    (source,) = ctx.input_names.get("comparison", ("COMPARISON",))
    return judge_latency(config, comparison, source.partition(".")[0])


class Selection(NamedTuple):
    """What select.best returns."""

    model: Selected
    verdict: Verdict


@stage("select.best", packages=_STATISTICS)
def select_best(config: SelectConfig, ctx: Context, comparison: Comparison, models: Sequence[Deployable]) -> Selection:
    """Select the smallest, fastest or best of several models among those that lose little against the baseline.

    `models` are the candidates; all are in the comparison. Each is tested as in gate.quality, with Holm's correction
    for their number. The output `model` is the selected one, of whatever format, and any stage that takes a model of
    any format takes it: eval.predict, eval.compare; `ptpipe get` copies its file. The output `verdict` makes this a
    gate: where no model passes it refuses, no model is selected, and stages that need one are skipped. With the
    baseline among `models` that can't happen.
    """
    from ptpipe_eval.select import choose

    names = ctx.input_names["models"]
    name, verdict = choose(config, comparison, names)
    return Selection(Selected() if name is None else Selected(name, models[names.index(name)]), verdict)


@stage("select.model")
def select_model(config: StageConfig, ctx: Context, selected: Selected) -> Model:
    """Take the torch model out of a selection, for stages that train, quantize or export one."""
    if not isinstance(selected.model, Model):
        raise StageError(f"the selected model, {selected.name}, is no torch model but {selected.format}")
    return selected.model


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Return the kinds of this plugin."""
    return [
        eval_predict,
        eval_compare,
        eval_latency,
        gate_accuracy,
        gate_quality,
        gate_size,
        gate_latency,
        select_best,
        select_model,
    ]


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Report baselines and candidates that are not compared, and latencies and qualities that are not measured."""
    from ptpipe_eval.checks import comparison_problems
    from ptpipe_eval.quality.resolution import zero_margin_warnings

    return [*comparison_problems(plan), *zero_margin_warnings(plan)]


@hookimpl
def ptpipe_check_results(plan: Plan, summaries: Mapping[str, Mapping[str, Mapping[str, JSON]]]) -> Iterable[Problem]:
    """Report gates on metrics that there are not, and warn of those that the samples are too few for."""
    from ptpipe_eval.checks import metric_problems
    from ptpipe_eval.quality.resolution import margin_warnings

    return [*metric_problems(plan, summaries), *margin_warnings(plan, summaries)]


@hookimpl
def ptpipe_report_sections(plan: Plan, run: RunFinished, load: Callable[[str, str], Artifact]) -> Iterable[Section]:
    """Add what got worse, the samples that are lost, and the rounds of latency measurements."""
    from ptpipe_eval.report import report_sections

    return report_sections(plan, run, load)
