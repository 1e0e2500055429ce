"""Check comparisons and gates of a plan before any work. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ptpipe import JSON, nearest
from ptpipe_eval.config import DropTest, EvalLatencyConfig, GateConfig, LatencyConfig, SelectConfig, TimingOptions
from ptpipe_eval.latency.latencies import cell_label
from ptpipe_torch import Model

if TYPE_CHECKING:
    from ptpipe import Plan, PlannedStage, Problem


_RELATIVE = {"max_drop", "max_ratio"}
_LIMITS = (*sorted(_RELATIVE), "min_accuracy", "min_value", "max_value", "max_bytes", "max_ms")


def comparison_problems(plan: Plan) -> Iterator[Problem]:
    """Check every comparison's baseline, every gate's candidates and latency, and what selections are made of."""
    for stage in plan.stages:
        if isinstance(stage.config, TimingOptions):
            yield from _baseline_problems(plan, stage, stage.config)
        elif isinstance(stage.config, GateConfig | SelectConfig):
            source = plan[stage.wiring["comparison"][0].stage]
            if isinstance(source.config, TimingOptions):  # not a comparison of another plugin
                yield from _candidate_problems(plan, stage, stage.config, source)
                yield from _baseline_alone_problems(plan, stage, stage.config, source)
                yield from _latency_problems(plan, stage, stage.config, source)
                if isinstance(stage.config, DropTest) and isinstance(source.config, EvalLatencyConfig):
                    message = f"{source.id} (eval.latency) measures no quality: take a comparison of eval.compare"
                    yield plan.problem(stage.id, message)
        elif stage.kind == "select.model":
            yield from _selection_problems(plan, stage)


def metric_problems(plan: Plan, summaries: Mapping[str, Mapping[str, Mapping[str, JSON]]]) -> Iterator[Problem]:
    """Yield gates on metrics that the task of the data set doesn't have, where that is stored.

    `summaries`: of stored outputs, by stage and output.
    """
    for gate in plan.stages:
        if not isinstance(gate.config, DropTest):
            continue
        source = plan[gate.wiring["comparison"][0].stage]
        for data in source.wiring["data"] if isinstance(source.config, TimingOptions) else ():
            metrics = summaries.get(data.stage, {}).get(data.output, {}).get("metrics")
            name = getattr(gate.config, "metric", "accuracy")
            if isinstance(metrics, list) and name not in (None, *metrics):
                message = f"{data} has no metric {name!r}, but {', '.join(map(str, metrics)) or 'none'}"
                yield plan.problem(gate.id, message, "metric", suggestion=nearest(name, map(str, metrics)))


def _baseline_problems(plan: Plan, stage: PlannedStage, config: TimingOptions) -> Iterator[Problem]:
    names = [str(reference) for reference in stage.wiring["models"]]
    if config.baseline is not None and config.baseline not in names:
        message = f"baseline {config.baseline!r} is not among its models: {', '.join(names)}"
        yield plan.problem(stage.id, message, "baseline", suggestion=nearest(config.baseline, names))


def _candidate_problems(
    plan: Plan, gate: PlannedStage, config: GateConfig | SelectConfig, source: PlannedStage
) -> Iterator[Problem]:
    compared = [str(reference) for reference in source.wiring["models"]]
    if isinstance(config, SelectConfig):
        option, names = [], [str(reference) for reference in gate.wiring["models"]]
    else:
        option, names = ["candidates" if config.candidates else "candidate"], list(config.names)
    for name in names:
        if name not in compared:
            message = f"candidate {name!r} is not among the models of {source.id}: {', '.join(compared)}"
            yield plan.problem(gate.id, message, *option, suggestion=nearest(name, compared))


def _baseline_alone_problems(
    plan: Plan, gate: PlannedStage, config: GateConfig | SelectConfig, source: PlannedStage
) -> Iterator[Problem]:
    """Yield a warning where a gate compares the baseline with itself, and has no other limit."""
    assert isinstance(source.config, TimingOptions)
    baseline = source.config.baseline or str(source.wiring["models"][0])
    if isinstance(config, SelectConfig) or getattr(config, "baseline_file", None) or config.candidate != baseline:
        return
    limits = [name for name in _LIMITS if getattr(config, name, None) is not None]
    if set(limits) <= _RELATIVE:
        message = f"candidate {baseline!r} is the baseline of {source.id}: {limits[0]} compares it with itself"
        yield plan.problem(gate.id, message, "candidate", severity="warning")


def _latency_problems(
    plan: Plan, gate: PlannedStage, config: GateConfig | SelectConfig, source: PlannedStage
) -> Iterator[Problem]:
    assert isinstance(source.config, TimingOptions)
    if not (isinstance(config, LatencyConfig) or (isinstance(config, SelectConfig) and config.by == "latency")):
        return
    sizes, lengths = source.config.batch_sizes, source.config.lengths or (None,)
    measured = [(size, threads, length) for size in sizes for length in lengths for threads in source.config.threads]
    if (config.batch_size, config.threads, config.length) not in measured:
        available = "; ".join(cell_label(*cell) for cell in measured) or "no latency"
        wrong = "length" if config.length not in lengths else "threads"
        wrong = wrong if config.batch_size in sizes else "batch_size"
        wanted = cell_label(config.batch_size, config.threads, config.length)
        yield plan.problem(gate.id, f"{source.id} does not measure {wanted}; it measures: {available}", wrong)


def _selection_problems(plan: Plan, stage: PlannedStage) -> Iterator[Problem]:
    source = plan[stage.wiring["selected"][0].stage]
    for reference in source.wiring.get("models", ()):
        (type_,) = (port.type for port in plan[reference.stage].stage.outputs if port.name == reference.output)
        if not issubclass(type_, Model):
            message = f"{source.id} may select {reference}, which is a {type_.__name__} and no torch model"
            yield plan.problem(stage.id, message)
