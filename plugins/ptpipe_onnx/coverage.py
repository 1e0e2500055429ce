"""Which layers of a file ONNX Runtime computes with integer kernels, and why it does not compute the others so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ptpipe import JSON
from ptpipe_onnx.file_layers import FileLayer, layers_of
from ptpipe_onnx.graph import consumers, producer
from ptpipe_onnx.kernels import Kernels
from ptpipe_torch.ort import ort

_MAX_NAMED = 5
_FLOAT_IN_MODEL = "they are float in the model"


@dataclass(frozen=True)
class CoveredLayer:
    """A layer of a file, and how ONNX Runtime computes it."""

    name: str
    kind: str
    reason: str = ""
    """Why it computes in float; empty if it runs as an integer kernel."""


@dataclass(frozen=True)
class Coverage:
    """All layers of a file."""

    layers: tuple[CoveredLayer, ...]

    @property
    def float_layers(self) -> Mapping[str, str]:
        """Why a layer computes in float, by its name."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason}

    @property
    def is_as_in_the_model(self) -> bool:
        """Whether all layers that are int8 in the model run as integer kernels."""
        return all(reason == _FLOAT_IN_MODEL for reason in self.float_layers.values())

    @property
    def figures(self) -> Mapping[str, JSON]:
        """Recorded figures."""
        num_float = sum(bool(layer.reason) for layer in self.layers)
        return {
            "integer_coverage": self.counts,
            "num_int8_layers": len(self.layers) - num_float,
            "num_float_layers": num_float,
        }

    @property
    def counts(self) -> str:
        """`53 of 53 convolutions, 1 of 1 linear layers`."""
        num_all = Counter(layer.kind for layer in self.layers)
        num_int8 = Counter(layer.kind for layer in self.layers if not layer.reason)
        return ", ".join(f"{num_int8[kind]} of {number} {kind}s" for kind, number in num_all.items())

    def __str__(self) -> str:
        """The counts, and the layers in float with their reasons."""
        text = f"{self.counts or 'no layer'} run as integer kernels in ONNX Runtime {ort.__version__}"
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.float_layers.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            listed = ", ".join(names[:_MAX_NAMED]) + (
                f" and {len(names) - _MAX_NAMED} more" * (len(names) > _MAX_NAMED)
            )
            text += f"; in float because {reason}: {listed}"
        return text


def coverage_of(
    path: Path, kernels: Kernels, names: Mapping[str, str], float_reasons: Mapping[str, str] | None = None
) -> Coverage:
    """Return how ONNX Runtime computes the layers of a file.

    `names`: of layers whose weight is named otherwise. `float_reasons`: why layers were exported in float, by name.
    """
    found = list(layers_of(ir.load(path).graph))
    num_sharing = Counter(layer.weight.name for layer in found if layer.weight is not None)
    covered = []
    for layer in found:
        weight = "" if layer.weight is None else str(layer.weight.name)
        # A weight of one layer identifies its kernel; what shares one, or has none, is found by the operator's name.
        is_int8 = layer.node.name in kernels.integer_nodes
        if num_sharing[weight] == 1 and weight in kernels.integer_operands:
            is_int8 = layer.integers is not None
        name = names.get(layer.name, layer.name)
        reason = "" if is_int8 else (float_reasons or {}).get(name) or _reason(layer)
        covered.append(CoveredLayer(name, layer.kind, reason))
    return Coverage(tuple(covered))


def _reason(layer: FileLayer) -> str:
    if layer.weight is not None and layer.integers is None:
        return _FLOAT_IN_MODEL
    if layer.node.op_type in ("MatMulInteger", "ConvInteger"):
        return f"ONNX Runtime has no integer kernel for such a {layer.node.op_type}"
    if producer(layer.node.inputs[0], "DequantizeLinear") is None:
        return "their input is float"
    if layer.weight is None and producer(layer.node.inputs[1], "DequantizeLinear") is None:
        return _FLOAT_IN_MODEL
    readers = {reader.op_type for reader in consumers(layer.node.outputs[0])}
    if readers != {"QuantizeLinear"}:
        return f"{' and '.join(sorted(readers)) or 'the caller'} reads their output in float"
    return f"ONNX Runtime has no integer kernel for {layer.node.op_type} of such inputs"
