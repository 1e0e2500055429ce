"""Find quant stages in an order that can't work, before anything runs. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ptpipe_quant.config import PrepareQatConfig
from ptpipe_torch import Model

if TYPE_CHECKING:
    from ptpipe import Plan, PlannedStage, Problem, Reference


@dataclass(frozen=True)
class _State:
    """How far a model is on its way to int8, according to the plan."""

    stage: str
    """The stage that brought it there."""
    kind: str = "model"
    """That stage's kind if it is a quant stage."""
    has_seen_data: bool = False
    """Whether a stage after that one may have run the model on data."""
    needs_calibration: bool = False
    """Whether ranges are frozen before the first step of a training, and quant.calibrate has not set them."""
    corrected_by: str = ""
    """The stage that corrected its biases."""

    @property
    def is_int8(self) -> bool:
        return self.kind in ("quant.convert", "quant.dynamic")


def order_problems(plan: Plan) -> Iterator[Problem]:
    """Check the state of the model that each quant stage receives, and each training and export."""
    for stage in plan.stages:
        if stage.kind in _REQUIREMENTS and (reference := _model_reference(stage)) is not None:
            message = _REQUIREMENTS[stage.kind](_state(plan, reference))
            if message:
                yield plan.problem(stage.id, message)


def _state(plan: Plan, reference: Reference) -> _State:
    stage = plan[reference.stage]
    if stage.kind in ("quant.prepare", "quant.prepare_qat", "quant.convert", "quant.dynamic"):
        never_observes = isinstance(stage.config, PrepareQatConfig) and stage.config.freeze_at == 0
        return _State(stage.id, stage.kind, needs_calibration=never_observes)
    if stage.kind == "quant.tune":
        return _State(stage.id, stage.kind, has_seen_data=True)
    upstream = _model_reference(stage)
    if upstream is None:
        return _State(stage.id)
    # Training, calibration and any third party's stage leave a prepared model prepared.
    state = _state(plan, upstream)
    needs_calibration = state.needs_calibration and stage.kind != "quant.calibrate"
    corrected_by = stage.id if stage.kind == "quant.bias_correct" else state.corrected_by
    return replace(state, has_seen_data=True, needs_calibration=needs_calibration, corrected_by=corrected_by)


def _model_reference(stage: PlannedStage) -> Reference | None:
    """Return what the stage's single model port is bound to; an optional one, as of a teacher, is another's."""
    models = [port for port in stage.stage.inputs if issubclass(port.type, Model)]
    ports = [port for port in models if not port.several and not port.optional]
    references = [reference for port in ports for reference in stage.wiring.get(port.name, ())]
    return references[0] if len(references) == 1 else None


def _requires_float(state: _State) -> str | None:
    if state.kind == "model":
        return None
    change = "made it int8" if state.is_int8 else "prepared it"
    return f"needs a float model, but {state.stage} ({state.kind}) has already {change}"


def _requires_prepared(state: _State) -> str | None:
    if state.is_int8:
        return f"needs a prepared model, but {state.stage} ({state.kind}) has already made it int8"
    if state.kind == "model":
        return (
            f"needs a prepared model, but there is no quant.prepare or quant.prepare_qat between {state.stage} and this"
        )
    return None


def _requires_converted(state: _State) -> str | None:
    if state.kind == "model" or state.is_int8:
        return None
    return (
        f"needs a float or an int8 model, but {state.stage} ({state.kind}) has prepared it for int8: put a "
        f"quant.convert between {state.stage} and this"
    )


def _requires_ranges(state: _State) -> str | None:
    if (message := _requires_prepared(state)) is not None:
        return message
    if state.has_seen_data:
        return None
    missing = "quant.calibrate" if state.kind == "quant.prepare" else "train.supervised"
    return f"needs a model whose observers have seen data: put {missing} between {state.stage} and this"


def _requires_trainable(state: _State) -> str | None:
    if state.is_int8:
        return f"trains float and prepared models, but {state.stage} ({state.kind}) has already made it int8"
    if not state.needs_calibration:
        return None
    return (
        f"would train without rounding activations, because freeze_at of {state.stage} is 0: their ranges are frozen "
        f"before any is observed. Put quant.calibrate between {state.stage} and this, or set a freeze_at above 0"
    )


def _requires_calibrated(state: _State) -> str | None:
    if state.kind == "quant.prepare_qat":
        return (
            f"needs a model from quant.prepare, but {state.stage} ({state.kind}) prepared it for training, which fits "
            "weights and biases to int8: leave this out"
        )
    if (message := _requires_ranges(state)) is not None:
        return message
    if state.corrected_by:
        return (
            f"needs biases that are not corrected yet, but {state.corrected_by} (quant.bias_correct) is above: "
            "it is the last repair in front of quant.convert, and runs once"
        )
    return None


_REQUIREMENTS = {
    "export.onnx": _requires_converted,
    "export.executorch": _requires_converted,
    "train.supervised": _requires_trainable,
    "quant.tune": _requires_float,
    "quant.dynamic": _requires_float,
    "quant.prepare": _requires_float,
    "quant.prepare_qat": _requires_float,
    "quant.calibrate": _requires_prepared,
    "quant.analyze": _requires_ranges,
    "quant.convert": _requires_ranges,
    "quant.equalize": _requires_float,
    "quant.smooth": _requires_float,
    "quant.adaround": _requires_calibrated,
    "quant.bias_correct": _requires_calibrated,
}
