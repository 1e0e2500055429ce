"""Find ONNX files that can't be quantized, before anything runs. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ptpipe_onnx.config import ExportConfig
from ptpipe_torch import Model, OnnxFile

if TYPE_CHECKING:
    from ptpipe import Plan, PlannedStage, Problem

_QUANTIZERS = ("quant.onnx", "quant.weight_only")
_INT8 = (*_QUANTIZERS, "quant.convert", "quant.dynamic")


def order_problems(plan: Plan) -> Iterator[Problem]:
    """Check that each stage that quantizes a file gets a float network alone, as far as the plan shows."""
    for stage in plan.stages:
        if stage.kind not in _QUANTIZERS:
            continue
        for before in _stages_before(plan, stage):
            if before.kind in _INT8:
                yield plan.problem(stage.id, f"needs a float file, but {before.id} ({before.kind}) has quantized it")
                break
            if isinstance(before.config, ExportConfig) and before.config.has_interface:
                message = f"needs the network alone, but {before.id} has preprocessing or postprocessing in its file"
                yield plan.problem(stage.id, message)
                break


def _stages_before(plan: Plan, stage: PlannedStage) -> Iterator[PlannedStage]:
    """Yield the stages that the model of this one comes from, the last one first."""
    ports = [port for port in stage.stage.inputs if issubclass(port.type, Model | OnnxFile) and not port.several]
    references = [reference for port in ports for reference in stage.wiring.get(port.name, ())]
    if len(references) == 1:
        before = plan[references[0].stage]
        yield before
        yield from _stages_before(plan, before)
