"""The form of int8 networks for runtimes whose integers are signed, and which fuse operators by patterns.

XNNPACK, by way of ExecuTorch, computes an operator in int8 where its inputs are dequantized for it alone, its weight is
dequantized from int8 in the graph, and its output is quantized at once (static), or where a linear layer's input is
quantized at run time and its weight has a scale for each output (dynamic).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import StageError
from ptpipe_torch.int8.decomposed import (
    CHOOSE_LEVELS,
    DEQUANTIZE,
    DEQUANTIZE_AT,
    DEQUANTIZE_CHANNELS,
    QUANTIZE,
    QUANTIZE_AT,
)
from ptpipe_torch.int8.layers import QuantizedWeight

_OFFSET = 128
_RANGE = (-128, 127, torch.int8)
_SMALLEST_SCALE = torch.finfo(torch.float32).eps


def use_signed_integers(reference: GraphModule, weights: Mapping[str, QuantizedWeight]) -> None:
    """Bring a reference network, whose activations are uint8 and whose weights are float, into this form, in place.

    Integers and zero points become 128 less, and stand for the same values. `weights`: by parameter name, from
    `fx.reference_network`. Raises StageError, naming the layer, for weights with a zero point.
    """
    for node in reference.graph.nodes:
        if node.target in (QUANTIZE, DEQUANTIZE) and node.args[-1] is torch.uint8:
            arguments: Any = node.args
            value, scale, *integers, _ = arguments
            node.args = (value, scale, *(number - _OFFSET for number in integers), torch.int8)
    _dequantize_for_each_reader(reference)
    for name, weight in weights.items():
        layer: Any = reference.get_submodule(name.rpartition(".")[0])
        layer.weight = None
        _store(layer, name, weight)
        layer.get_weight = functools.partial(_dequantized, layer, weight)  # torch's reference layers call it
    reference.recompile()


def _dequantize_for_each_reader(reference: GraphModule) -> None:
    for dequantize in reference.graph.find_nodes(op="call_function", target=DEQUANTIZE):
        for reader in list(dequantize.users)[1:]:
            with reference.graph.inserting_before(reader):
                own = reference.graph.call_function(DEQUANTIZE, dequantize.args)
            reader.replace_input_with(dequantize, own)


class SignedDynamicLinear(nn.Module):
    """A linear layer that quantizes its input at run time to int8, over the range of the tensor."""

    def __init__(self, name: str, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight = weight.with_scale_of_each_row()
        _store(self, name, self._weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name that nn.Linear gives it
        """Apply the layer to float activations."""
        scale, zero_point = CHOOSE_LEVELS(input, -128, 127, _SMALLEST_SCALE, torch.int8)
        integers = QUANTIZE_AT(input, scale, zero_point, *_RANGE)
        rounded = DEQUANTIZE_AT(integers, scale, zero_point, *_RANGE)
        return nn.functional.linear(rounded, _dequantized(self, self._weight), self.bias)


def _store(layer: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Give a layer the integers of its weight, and the scales of channels, as buffers."""
    if weight.zero_points.any():
        raise StageError(f"{name} has zero points other than 0, which XNNPACK does not take: leave the layer float")
    layer.register_buffer("weight_integers", torch.from_numpy(weight.integers.copy()))
    if weight.per_channel:
        layer.register_buffer("weight_scales", torch.from_numpy(weight.scales.copy()))
        layer.register_buffer("weight_zero_points", torch.zeros(len(weight.scales), dtype=torch.int64))


def _dequantized(layer: Any, weight: QuantizedWeight) -> torch.Tensor:
    if weight.per_channel:
        grids = (layer.weight_scales, layer.weight_zero_points, weight.axis)
        values: torch.Tensor = DEQUANTIZE_CHANNELS(layer.weight_integers, *grids, *_RANGE)
    else:
        values = DEQUANTIZE(layer.weight_integers, float(weight.scales), 0, *_RANGE)
    return values
