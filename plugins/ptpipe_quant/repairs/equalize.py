"""Cross-layer equalization with high-bias absorption.

Source: M. Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, ICCV 2019, sections
4.1 and 4.1.3, appendix A. Per channel, s = sqrt(r1 / r2) makes the range r1 / s of the first layer that of the second,
r2 * s. Chains of layers (convolution, depthwise convolution, convolution) converge by repetition.

The bias is divided by s as well: where all weights of a channel are nearly zero, nothing but it comes out of the
channel, and an s of 1e-6 would leave no integers to all other channels of the activation. So s has a lower limit.

Shape legend: C channels of an edge; O output, I input channels of a layer, G its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import Context, StageError
from ptpipe_quant.repairs.channels import CONVOLUTIONS, Edge, EdgeFinder, Layer, all_layers, unscalable_text
from ptpipe_quant.repairs.config import EqualizeConfig
from ptpipe_quant.repairs.float_model import (
    changeable_names,
    check_float,
    check_same_function,
    function_change,
    traced,
    with_changed,
)
from ptpipe_torch import Model

_MAX_ROUNDS, _CONVERGED = 100, 1e-3
_MAX_GROWTH = 4.0
"""Of what the bias alone makes of a channel, relative to the layer's largest value; of trained networks 3 at most."""
_INT8_RATIO = 2 * 127
"""Weights that are smaller than the largest one by this factor are zero in int8."""
_NUM_DEVIATIONS = 3
"""How far below its mean a channel's values are expected, in standard deviations."""


@torch.no_grad()
def equalize(config: EqualizeConfig, ctx: Context, model: Model) -> Model:
    """Implement `quant.equalize`."""
    check_float(model, ctx.kind)
    graph = traced(model, config.skip)
    edges, refused = EdgeFinder(graph, changeable_names(model, config.skip)).edges(*CONVOLUTIONS, nn.Linear)
    if not edges:
        raise StageError(f"{ctx.kind}: no two consecutive layers can be equalized: {unscalable_text(refused)}")
    before = _range_ratios(edges)
    rounds = _scale(edges)
    after = _range_ratios(edges)
    names = dict.fromkeys(name for edge in edges for name in edge.changed_parameters())
    equalized = with_changed(model, graph, names)
    check_same_function(ctx, model, equalized)
    ctx.metric(
        equalized_pairs=sum(len(edge.consumers) for edge in edges),
        rounds=rounds,
        worst_range_ratio_before=max(before),
        worst_range_ratio=max(after),
        left_alone=[f"{name}: {reason}" for name, reason in list(refused.items())[:20]],
    )
    if not config.absorb_bias:
        return equalized
    num_absorbed = sum(_absorb(edge, graph) for edge in edges)
    absorbed = with_changed(model, graph, names)
    ctx.metric(absorbed_channels=num_absorbed, absorption_difference=function_change(ctx, equalized, absorbed))
    return absorbed


def _scale(edges: Sequence[Edge]) -> int:
    """Equalize all edges until nothing changes; return the number of rounds."""
    constants = [_constants(edge.producer) for edge in edges]
    totals = [torch.ones_like(constant_C) for constant_C in constants]
    for number in range(1, _MAX_ROUNDS + 1):
        change = 0.0
        for edge, constant_C, total_C in zip(edges, constants, totals, strict=True):
            first_C, second_C = edge.producer.output_ranges(), edge.input_ranges()
            scale_C = torch.sqrt(first_C / second_C)
            # A channel of zeros has no range to even out.
            scale_C = torch.where(scale_C.isfinite() & (scale_C > 0), scale_C, 1.0)
            evened_C = torch.sqrt(first_C * second_C)
            is_live_C = evened_C * _INT8_RATIO >= evened_C.max()
            lowest_C = constant_C / _MAX_GROWTH * (total_C * scale_C)[is_live_C].median()
            scale_C = torch.where(total_C * scale_C < lowest_C, lowest_C / total_C, scale_C)
            edge.scale(scale_C)
            total_C.mul_(scale_C)
            change = max(change, scale_C.log().abs().max().item())
        if change < _CONVERGED:
            return number
    return _MAX_ROUNDS


def _constants(layer: Layer) -> torch.Tensor:
    """Return the size of each channel's bias, relative to the largest value that batch norm or biases tell, C."""
    last: Any = layer.module if layer.norm is None else layer.norm
    if last.bias is None:
        return torch.zeros(len(last.weight))
    constant_C: torch.Tensor = last.bias.detach().abs()
    largest_C = constant_C if layer.norm is None else constant_C + _NUM_DEVIATIONS * last.weight.detach().abs()
    return constant_C / largest_C.max().clamp(min=torch.finfo(torch.float32).tiny)


def _range_ratios(edges: Sequence[Edge]) -> list[float]:
    """Return, for each layer, by how much its largest channel's range exceeds the median one."""
    ratios = []
    for layer in all_layers(edges):
        ranges_O = layer.output_ranges()
        positive = ranges_O[ranges_O > 0]
        ratios.append((positive.max() / positive.median()).item() if len(positive) else 1.0)
    return ratios


def _absorb(edge: Edge, graph: GraphModule) -> int:
    """Move what ReLU does not cut off of the producer's shift into the consumers; return the number of channels.

    relu(x) = relu(x - c) + c wherever x >= c. Nothing is done where the consumer pads: its zeros are not shifted.
    """
    norm = edge.producer.norm
    path = [graph.get_submodule(str(node.target)) if node.op == "call_module" else None for node in edge.path]
    is_relu_alone = sum(type(layer) is nn.ReLU for layer in path) == 1
    if norm is None or not is_relu_alone or not all(isinstance(layer, nn.ReLU | nn.Identity) for layer in path):
        return 0
    if not all(map(_takes_shift, edge.consumers)):
        return 0
    shift_C = (norm.bias - _NUM_DEVIATIONS * norm.weight.abs()).clamp(min=0)
    norm.bias.sub_(shift_C)
    for consumer in edge.consumers:
        _add_input_shift(consumer, shift_C)
    return int((shift_C > 0).sum())


def _takes_shift(layer: Layer) -> bool:
    if isinstance(layer.module, CONVOLUTIONS) and any(layer.module.padding):
        return False
    return layer.norm is not None or layer.module.bias is not None


def _add_input_shift(layer: Layer, shift_I: torch.Tensor) -> None:
    """Let a layer compute with inputs that are smaller by `shift_I` what it did before, in place."""
    weight = layer.weight.flatten(2).sum(2) if layer.weight.dim() > 2 else layer.weight
    grouped = weight.reshape(layer.num_groups, -1, weight.shape[1])
    added_O = torch.einsum("goi,gi->go", grouped, shift_I.reshape(layer.num_groups, -1)).flatten()
    if layer.norm is not None:
        layer.norm.running_mean.sub_(added_O)  # in train mode the batch's mean moves likewise
    else:
        bias: Any = layer.module.bias
        bias.add_(added_O)
