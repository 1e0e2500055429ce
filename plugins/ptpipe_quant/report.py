"""What quantization adds to a run's report: the range of every tensor, and what rounding does to every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ptpipe import Artifact, Outcome, Plan, RunFinished, Section
from ptpipe.sections import Block, Dot, DotPlot, DotSeries, Mark, Text, Topic
from ptpipe_quant.analysis.layer_errors import LayerErrors
from ptpipe_quant.analysis.report import section as layer_section
from ptpipe_quant.tuning.report import section as trials_section
from ptpipe_quant.tuning.trials import Trials
from ptpipe_torch import Ranges

_MAX_SHOWN = 40
_ENDED = (Outcome.DONE, Outcome.CACHED)


def report_sections(plan: Plan, run: RunFinished, load: Callable[[str, str], Artifact]) -> Iterator[Section]:
    """Yield the ranges of every calibration that ended, and the errors of every analysis."""
    for stage in run.stages:
        ports = plan[stage.stage_id].stage.outputs if stage.outcome in _ENDED else ()
        for port in ports:
            if issubclass(port.type, Ranges):
                ranges = load(stage.stage_id, port.name)
                assert isinstance(ranges, Ranges), type(ranges)
                if ranges.limits:
                    blocks = tuple(_blocks(ranges))
                    yield Section(f"Calibration ranges: {stage.stage_id}", blocks, Topic.QUANTIZATION, stage.stage_id)
            elif issubclass(port.type, LayerErrors):
                errors = load(stage.stage_id, port.name)
                assert isinstance(errors, LayerErrors), type(errors)
                if errors.layers:
                    yield layer_section(stage.stage_id, errors)
            elif issubclass(port.type, Trials):
                trials = load(stage.stage_id, port.name)
                assert isinstance(trials, Trials), type(trials)
                yield trials_section(stage.stage_id, trials)


def _blocks(ranges: Ranges) -> Iterator[Block]:
    limits = list(ranges.limits.items())
    shown = limits
    if len(limits) > _MAX_SHOWN:
        # The widest ones have the coarsest steps; in the order of the network, as the rest.
        widest = {name for name, (low, high) in sorted(limits, key=lambda of: of[1][0] - of[1][1])[:_MAX_SHOWN]}
        shown = [(name, limit) for name, limit in limits if name in widest]
        yield Text(f"The {_MAX_SHOWN} widest of {len(limits)} tensors.")
    dots = tuple(Dot(low=low, high=high) for _, (low, high) in shown)
    yield DotPlot(
        f"Values of each tensor, over {ranges.num_samples:,} samples",
        "value",
        tuple(name for name, _ in shown),
        (DotSeries("range", dots),),
        (Mark("0", "x", 0.0),),
    )
