"""Check comparisons and gates of a plan before any work. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ptpipe import nearest
from ptpipe_eval.config import GateConfig, LatencyConfig, TimingOptions
from ptpipe_eval.latency.latencies import cell_label

if TYPE_CHECKING:
    from ptpipe import Plan, PlannedStage, Problem


def comparison_problems(plan: Plan) -> Iterator[Problem]:
    """Check every comparison's baseline and every gate's candidate and latency."""
    for stage in plan.stages:
        if isinstance(stage.config, TimingOptions):
            yield from _baseline_problems(plan, stage, stage.config)
        elif isinstance(stage.config, GateConfig):
            source = plan[stage.wiring["comparison"][0].stage]
            if isinstance(source.config, TimingOptions):  # not a comparison of another plugin
                yield from _gate_problems(plan, stage, stage.config, source)


def _baseline_problems(plan: Plan, stage: PlannedStage, config: TimingOptions) -> Iterator[Problem]:
    names = [str(reference) for reference in stage.wiring["models"]]
    if config.baseline is not None and config.baseline not in names:
        message = f"baseline {config.baseline!r} is not among its models: {', '.join(names)}"
        yield plan.problem(stage.id, message, "baseline", suggestion=nearest(config.baseline, names))


def _gate_problems(plan: Plan, gate: PlannedStage, config: GateConfig, source: PlannedStage) -> Iterator[Problem]:
    names = [str(reference) for reference in source.wiring["models"]]
    if config.candidate not in names:
        message = f"candidate {config.candidate!r} is not among the models of {source.id}: {', '.join(names)}"
        yield plan.problem(gate.id, message, "candidate", suggestion=nearest(config.candidate, names))
    assert isinstance(source.config, TimingOptions)
    if isinstance(config, LatencyConfig):
        lengths = source.config.lengths or (None,)
        measured = [
            (size, threads, length)
            for size in source.config.batch_sizes
            for length in lengths
            for threads in source.config.threads
        ]
        if (config.batch_size, config.threads, config.length) not in measured:
            available = "; ".join(cell_label(*cell) for cell in measured) or "no latency"
            wrong = "length" if config.length not in lengths else "threads"
            wrong = wrong if config.batch_size in source.config.batch_sizes else "batch_size"
            wanted = cell_label(config.batch_size, config.threads, config.length)
            yield plan.problem(gate.id, f"{source.id} does not measure {wanted}; it measures: {available}", wrong)
