"""Probabilities and classes as further outputs of a file, beside the scores that they are computed from.

Shape legend: K classes, on any axis but the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ptpipe import StageError
from ptpipe_onnx.vectors import Tolerance
from ptpipe_torch import Signature, Task, TensorSpec

_HALF_ULP = 2.0**-24
_EXP_ERROR = 8
"""Of float32 implementations of exp and of the division after it, in halves of a unit in the last place."""
_MAX_SPREAD = 104.0
"""Of scores: the powers of lower ones are 0 in float32, whose smallest number is exp(-103.3)."""


@dataclass(frozen=True)
class AddedOutputs:
    """What is computed of one output of the model."""

    scores: TensorSpec
    function: Literal["softmax", "sigmoid"]
    axis: int
    """Of the classes; of a sigmoid 1."""
    probabilities: str
    classes: str | None
    """None: each probability is of its own, and no class is the most probable one."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of the added outputs."""
        shape = self.scores.shape
        probabilities = TensorSpec(self.probabilities, "float32", shape)
        if self.classes is None:
            return (probabilities,)
        return probabilities, TensorSpec(self.classes, "int64", (*shape[: self.axis], *shape[self.axis + 1 :]))

    def tolerance(self, scores: Tolerance) -> Tolerance:
        """Return how far probabilities may differ where their scores may.

        The spectral norm of the Jacobian of a softmax is at most 1/2 (Gao and Pavel, 2017, "On the Properties of the
        Softmax Function"), which also bounds the change of one probability by the largest of a score; that of a
        sigmoid is 1/4.
        """
        num_classes = self.scores.shape[self.axis]
        rounding = 2 * _rounding(_MAX_SPREAD, num_classes if isinstance(num_classes, int) else 1)
        return Tolerance(min(1.0, scores.max_abs / 2 + rounding), min(1.0, scores.rms / 2 + rounding))


def outputs_to_add(signature: Signature, task: Task) -> tuple[AddedOutputs, ...]:
    """Return what a task's outputs become. Raises StageError where none of them are scores."""
    functions = task.probability_functions
    found = [spec for spec in signature.outputs if spec.name in functions]
    if not found:
        outputs = ", ".join(spec.name for spec in signature.outputs)
        raise StageError(
            f"postprocessing: the task {type(task).__name__} has no scores of classes or labels, and its {outputs} are "
            "in their final unit already: leave postprocessing out"
        )
    taken = {spec.name for spec in (*signature.inputs, *signature.outputs)}
    needs_prefix = len(found) > 1 or not taken.isdisjoint(("probabilities", "classes"))
    added = []
    for spec in found:
        prefix = f"{spec.name}_" if needs_prefix else ""
        axis = task.class_scores.get(spec.name)
        classes = None if axis is None else f"{prefix}classes"
        added.append(AddedOutputs(spec, functions[spec.name], axis or 1, f"{prefix}probabilities", classes))
    return tuple(added)


def add_postprocessing(graph: ir.Graph, added: Sequence[AddedOutputs]) -> None:
    """Append the outputs to those of the graph."""
    scores = {value.name: value for value in graph.outputs}
    for own in added:
        attributes = {"axis": own.axis} if own.function == "softmax" else {}
        operator = "Softmax" if own.function == "softmax" else "Sigmoid"
        nodes = [ir.node(operator, [scores[own.scores.name]], attributes, name=own.probabilities)]
        if own.classes is not None:
            nodes.append(ir.node("ArgMax", [scores[own.scores.name]], {"axis": own.axis, "keepdims": 0}))
            nodes[-1].name = own.classes
        for node, spec in zip(nodes, own.specs, strict=True):
            (output,) = node.outputs
            output.name, output.shape = spec.name, ir.Shape(spec.shape)
            output.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype)))
            graph.append(node)
            graph.outputs.append(output)


def check_postprocessing(added: Sequence[AddedOutputs], outputs: Mapping[str, npt.NDArray[Any]]) -> None:
    """Compare what a file computed of its scores with the same in float64; the classes must be equal.

    Raises StageError, with figures, for a difference that rounding does not explain.
    """
    for own in added:
        scores = outputs[own.scores.name].astype(np.float64)
        difference = np.abs(outputs[own.probabilities] - _probabilities(own, scores))
        allowed = _rounding(_spread(own, scores), scores.shape[own.axis])
        if not (difference <= allowed).all():
            raise StageError(
                f"{own.probabilities} of the file differ from the {own.function} of its {own.scores.name} by "
                f"{difference.max():.4g}, where {allowed:.4g} is allowed (rounding)"
            )
        if own.classes is not None:
            num_other = int((outputs[own.classes] != scores.argmax(own.axis)).sum())
            if num_other:
                raise StageError(f"{num_other} {own.classes} of the file are not those of its highest scores")


def _probabilities(own: AddedOutputs, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if own.function == "sigmoid":
        return np.asarray(np.exp(-np.logaddexp(0, -scores)))
    powers = np.exp(scores - scores.max(own.axis, keepdims=True))
    return np.asarray(powers / powers.sum(own.axis, keepdims=True))


def _spread(own: AddedOutputs, scores: npt.NDArray[np.float64]) -> float:
    """Return the largest number that is the argument of exp."""
    return float(np.ptp(scores, axis=own.axis).max() if own.function == "softmax" else np.abs(scores).max())


def _rounding(spread: float, num_classes: int) -> float:
    """Bound the rounding of float32: of an argument of exp, which makes it relative, and of a sum of the powers."""
    return _HALF_ULP * (_EXP_ERROR + spread + num_classes)
