"""Empirical bias correction.

Rounded weights and inputs shift the mean of what a layer computes; its bias takes that back, layer by layer, with the
layers before corrected already. Source: M. Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction, ICCV 2019, section 4.2 and appendix D.

Shape legend: O output channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ptpipe import JSON, Context
from ptpipe_quant.repaired import with_repaired
from ptpipe_quant.repairs.config import BiasCorrectConfig
from ptpipe_quant.repairs.lockstep import QuantizedPair
from ptpipe_quant.repairs.network_inputs import network_inputs
from ptpipe_torch import Data, Model
from ptpipe_torch.runtime import freed_memory_kept, torch_threads


@torch.no_grad()
def bias_correct(config: BiasCorrectConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Implement `quant.bias_correct`."""
    pair = QuantizedPair(ctx, model)
    shared = shared_layers(pair.float_network)
    biases, before_repair = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    names, shifts, left_alone = list[JSON](), dict[str, float](), list[str]()
    with torch_threads(None), freed_memory_kept():
        batches = list(network_inputs(ctx, model, data, config.split, config.num_samples))
        for layer in pair.layers(batches):
            if layer.name in shared:
                left_alone.append(layer.user_name)
                continue
            mean_O = _channel_means(layer.float_layer, layer.float_inputs)
            shift_O = _channel_means(layer.quantized_layer, layer.quantized_inputs) - mean_O
            bias = layer.quantized_layer.bias
            corrected_O = (torch.zeros_like(shift_O) if bias is None else bias.detach()) - shift_O
            layer.quantized_layer.bias = nn.Parameter(corrected_O, requires_grad=False)
            biases[f"{layer.name}.bias"] = corrected_O
            float_bias = layer.float_layer.bias
            before_repair[f"{layer.name}.bias"] = (
                torch.zeros_like(shift_O) if float_bias is None else float_bias.detach()
            )
            names.append(layer.user_name)
            shifts[layer.user_name] = (shift_O.abs().mean() / mean_O.abs().mean().clamp(min=1e-12)).item()
    if left_alone:
        ctx.notice(f"{', '.join(left_alone)}: not corrected, because several layers share the bias")
    worst = max(shifts, key=lambda name: shifts[name], default=None)
    ctx.metric(corrected_layers=len(names), largest_shift=shifts.get(str(worst), 0.0), most_shifted_layer=worst)
    return with_repaired(model, biases, before_repair, corrected_biases=names)


def _channel_means(layer: Any, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of each output channel over all batches, O."""
    total: Any = 0.0
    count = 0
    for batch in inputs:
        output = layer(batch)
        axis = output.dim() - 1 if isinstance(layer, nn.Linear) else 1
        values = output.transpose(0, axis).flatten(1)
        total, count = total + values.double().sum(1), count + values.shape[1]
    return torch.as_tensor(total / count).float()


def shared_layers(prepared: nn.Module) -> set[str]:
    """Return the layers whose weight or bias another one has too."""
    layers = [(name, layer) for name, layer in prepared.named_modules() if isinstance(layer, _layer_types())]
    uses = Counter(id(parameter) for _, layer in layers for parameter in layer._parameters.values())
    del uses[id(None)]
    return {name for name, layer in layers if any(uses[id(part)] > 1 for part in layer._parameters.values())}


def _layer_types() -> tuple[type[nn.Module], ...]:
    return (nn.Linear, nn.modules.conv._ConvNd)
