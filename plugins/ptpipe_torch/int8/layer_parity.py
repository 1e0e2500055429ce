"""Compare an implementation of an int8 network with its reference network, layer by layer.

The outputs of two int8 networks can't be compared element by element: one rounding that falls to the other side of a
tie changes all later ones. A single layer can. Its inputs are integers with a scale and a zero point, so both
implementations can be given exactly the same ones. The reference layer computes in float32 from the rounded weights,
the tested one in integers, and all that may differ is the rounding of the output: at most one step. So each layer of
the reference network is fed with the integers that the tested implementation computed, and its own output is compared
with the integers that come next. Parts that are float in the int8 network run in float here too and are compared as
part of the layer behind them.

`fx.reference_network` makes the reference network; the tested implementation is torch's int8 network or an ONNX file.

Source of the arithmetic: B. Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, CVPR 2018, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.model.outputs import tensors_of

NEAR_TIE = 1 / 16
"""In steps. A value that far from the middle between two integers may be rounded to either."""
_QUANTIZATION = (QUANTIZE, DEQUANTIZE)
_RELU_FUNCTIONS = (torch.relu, nn.functional.relu)


@dataclass(frozen=True)
class LayerDifference:
    """By how much the output of one int8 layer differs from the reference layer's, given the same inputs."""

    node: str
    """Name of the quantize node in the reference network."""
    layer: str
    """What the user calls it: the path of a module, or a function and the module that calls it."""
    operator: str
    """Name of its node in the traced network."""
    max_steps: float
    """Largest difference, in quantization steps of the output."""
    fraction: float
    """Fraction of the elements that differ by more than half a step, without those that the reference layer computes
    within `NEAR_TIE` of a tie: where few inputs occur, all may be the same tie."""


@dataclass(frozen=True)
class NetworkDifference:
    """Result of `compare_layers`."""

    layers: Sequence[LayerDifference]
    """In the order of a forward pass."""
    missing: Sequence[str]
    """Quantized tensors of the reference network, by layer, that the tested implementation did not provide."""
    output: float
    """Largest difference of the output from what follows from the last int8 tensors, relative to its largest value."""

    @property
    def worst(self) -> LayerDifference | None:
        """The layer with the largest difference, and among those the first; None without int8 layers."""
        return max(self.layers, key=lambda layer: layer.max_steps, default=None)


def compare_layers(
    reference: GraphModule,
    inputs: Sequence[torch.Tensor],
    found: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> NetworkDifference:
    """Run each reference layer on the inputs that the tested implementation computed, and compare the outputs.

    `reference`: from `fx.reference_network`. `found`: the integers of each quantized tensor, by the name of its
    quantize node in the reference network; a tensor on another grid is given in steps of the reference's, as floats
    (value / scale + zero point). `outputs`: what the tested implementation computed from the inputs.
    """
    comparison = _LayerByLayer(reference, found)
    with torch.no_grad():
        expected = tensors_of(comparison.run(*inputs))
    differences = map(_relative_difference, outputs, expected)
    largest = max(differences, default=0.0) if len(outputs) == len(expected) else float("inf")
    return NetworkDifference(comparison.layers, comparison.missing, largest)


def quantize_nodes(reference: GraphModule) -> list[Node]:
    """Return the nodes of a reference network that quantize a tensor, in the order of a forward pass."""
    nodes = reference.graph.find_nodes(op="call_function", target=QUANTIZE)
    return list(nodes)


def source_nodes(quantize: Node, network: GraphModule) -> list[Node]:
    """Return the node whose output is quantized and, if that is a ReLU fused with the node before it, this one too.

    A tensor may be quantized on two grids, one after the other.
    """
    source = quantize.all_input_nodes[0]
    while source.target in _QUANTIZATION:
        source = source.all_input_nodes[0]
    if not _is_relu(source, network):
        return [source]
    before = source.all_input_nodes[0]
    is_quantized = before.target is DEQUANTIZE
    return [source] if is_quantized else [source, before]


def layer_name(quantize: Node, network: GraphModule) -> str:
    """Return what the user calls the layer whose output is quantized here."""
    source = source_nodes(quantize, network)[-1]
    path = network.meta.get("scopes", {}).get(source.name, "")
    if source.op == "placeholder":
        return f"the input {source.name}"
    if source.op == "call_module":
        return path or str(source.target)
    return f"{source.name} in {path}" if path else source.name


class _LayerByLayer(Interpreter):
    """Runs a reference network; each tensor that is quantized is compared with, then replaced by, the found one."""

    def __init__(self, reference: GraphModule, found: Mapping[str, torch.Tensor]) -> None:
        super().__init__(reference)
        self._found = found
        self.layers: list[LayerDifference] = []
        self.missing: list[str] = []

    def run_node(self, n: Node) -> Any:
        if n.target is DEQUANTIZE:
            (integers, scale, zero_point, *_), _ = self.fetch_args_kwargs_from_env(n)
            return (integers.float() - zero_point) * scale
        result = super().run_node(n)
        if n.target is not QUANTIZE:
            return result
        name = layer_name(n, self.module)  # type: ignore[arg-type]  # an Interpreter takes any module
        found = self._found.get(n.name)
        if found is None:
            self.missing.append(name)
            return result
        (value, scale, _, *limits), _ = self.fetch_args_kwargs_from_env(n)
        is_tie = ((value / scale).frac().abs() - 0.5).abs() <= NEAR_TIE
        # What is no number, as the root of what no data set makes negative, has no integer: engines differ.
        is_number, compared = ~value.isnan(), (found, result, is_tie)
        if found.shape == result.shape and is_number.any():
            compared = (found[is_number], result[is_number], is_tie[is_number])
        steps, fraction = _difference(*compared, limits[:2])
        operator = source_nodes(n, self.module)[-1].name  # type: ignore[arg-type]  # as above
        self.layers.append(LayerDifference(n.name, name, operator, steps, fraction))
        return found if found.shape == result.shape else result  # what comes behind could not run on other shapes


def _difference(
    found: torch.Tensor, expected: torch.Tensor, is_tie: torch.Tensor, limits: Sequence[int]
) -> tuple[float, float]:
    """Return the largest difference in steps, and the fraction of the elements that differ; see `LayerDifference`."""
    if found.shape != expected.shape:
        return float("inf"), 1.0
    # Integers of another grid may stand for values beyond the limits of this one.
    steps = (found.float().clamp(*limits) - expected.float()).abs().nan_to_num(nan=torch.inf)
    if not steps.numel():
        return 0.0, 0.0
    return steps.max().item(), ((steps > 0.5) & ~is_tie).float().mean().item()


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():  # numbers of classes, say: rounding decides between nearly equal ones
        return 0.0
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    return difference / largest if largest else difference


def _is_relu(node: Node, network: GraphModule) -> bool:
    if node.op == "call_module":
        return type(network.get_submodule(str(node.target))) is nn.ReLU
    return node.target in _RELU_FUNCTIONS
