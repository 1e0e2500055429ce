"""Find ONNX files that are quantized twice, before anything runs. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ptpipe_torch import Model, OnnxFile

if TYPE_CHECKING:
    from ptpipe import Plan, PlannedStage, Problem

_QUANTIZERS = ("quant.onnx", "quant.weight_only")
_INT8 = (*_QUANTIZERS, "quant.convert", "quant.dynamic")


def order_problems(plan: Plan) -> Iterator[Problem]:
    """Check that each stage that quantizes a file gets a float one, as far as the plan shows."""
    for stage in plan.stages:
        if stage.kind in _QUANTIZERS and (before := _quantized_before(plan, stage)) is not None:
            yield plan.problem(stage.id, f"needs a float file, but {before.id} ({before.kind}) has quantized it")


def _quantized_before(plan: Plan, stage: PlannedStage) -> PlannedStage | None:
    """Return the stage above this one that quantized its model; stages between them pass it on."""
    ports = [port for port in stage.stage.inputs if issubclass(port.type, Model | OnnxFile) and not port.several]
    references = [reference for port in ports for reference in stage.wiring.get(port.name, ())]
    if len(references) != 1:
        return None
    before = plan[references[0].stage]
    return before if before.kind in _INT8 else _quantized_before(plan, before)
