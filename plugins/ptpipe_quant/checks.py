"""Quant stages in an order that can't work, found before any work. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ptpipe_torch import Model

if TYPE_CHECKING:
    from ptpipe import Plan, PlannedStage, Problem, Reference


@dataclass(frozen=True)
class _State:
    """How far a model is on its way to int8, as the plan tells."""

    maker: str
    """The stage that made it so."""
    made_by: str = "model"
    """That stage's kind where it is one of ours."""
    has_seen_data: bool = False
    """Whether anything ran it between."""


def order_problems(plan: Plan) -> Iterator[Problem]:
    """Look at what each quant stage's model has been through."""
    for stage in plan.stages:
        if stage.kind in _EXPECTATIONS and (reference := _model_reference(stage)) is not None:
            message = _EXPECTATIONS[stage.kind](_state(plan, reference))
            if message:
                yield plan.problem(stage.id, message)


def _state(plan: Plan, reference: Reference) -> _State:
    stage = plan[reference.stage]
    if stage.kind in ("quant.prepare", "quant.prepare_qat", "quant.convert", "quant.dynamic"):
        return _State(stage.id, stage.kind)
    upstream = _model_reference(stage)
    if upstream is None:
        return _State(stage.id)
    # Training, calibration, and whatever a stranger's stage does, leave a model as prepared as it was.
    return replace(_state(plan, upstream), has_seen_data=True)


def _model_reference(stage: PlannedStage) -> Reference | None:
    """What feeds the stage's one port for models to work on."""
    ports = [port for port in stage.stage.inputs if issubclass(port.type, Model) and not port.several]
    references = [reference for port in ports for reference in stage.wiring.get(port.name, ())]
    return references[0] if len(references) == 1 else None


def _of_float(state: _State) -> str | None:
    if state.made_by == "model":
        return None
    done = "int8" if state.made_by in ("quant.convert", "quant.dynamic") else "prepared"
    return f"needs a float model, but {state.maker} ({state.made_by}) has already made it {done}"


def _of_prepared(state: _State) -> str | None:
    if state.made_by in ("quant.convert", "quant.dynamic"):
        return f"needs a prepared model, but {state.maker} ({state.made_by}) has already made it int8"
    if state.made_by == "model":
        return (
            "needs a prepared model, but no quant.prepare or quant.prepare_qat stands between this and " + state.maker
        )
    return None


def _of_ready(state: _State) -> str | None:
    if (message := _of_prepared(state)) is not None:
        return message
    if state.has_seen_data:
        return None
    missing = "quant.calibrate" if state.made_by == "quant.prepare" else "train.supervised"
    return f"needs a model whose reporters have seen data: put {missing} between {state.maker} and this"


_EXPECTATIONS = {
    "quant.dynamic": _of_float,
    "quant.prepare": _of_float,
    "quant.prepare_qat": _of_float,
    "quant.calibrate": _of_prepared,
    "quant.convert": _of_ready,
}
