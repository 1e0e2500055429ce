"""What of an int8 network is float: its parts by name and type, and the fraction of the parameters that is int8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.recurrent import DynamicRecurrent

with deprecations_silenced():
    from torch.ao.nn.intrinsic.modules.fused import _FusedModule

_INT8_PACKAGES = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def float_parts(int8: nn.Module) -> list[str]:
    """Return each module of an int8 network that owns float parameters, as `name (type)`; norms as numbers by type.

    A parameter that no layer of a known type owns is listed by its own name.
    """
    parts, norms = [], Counter[str]()
    fused = {name for name, module in int8.named_modules() if isinstance(module, _FusedModule)}
    for path, module in int8.named_modules():
        outer = path.rpartition(".")[0]
        name = outer if outer in fused else path  # the user knows the whole by the name of its first layer
        own = [parameter for parameter, value in module._parameters.items() if value is not None]
        if not own or type(module).__module__.startswith(_INT8_PACKAGES):
            continue
        if isinstance(module, _NORMS):
            norms[type(module).__name__] += 1
        elif type(module).__module__.startswith("torch.nn.") and type(module) is not nn.Module:
            parts.append(f"{name} ({type(module).__name__})")
        else:
            parts += [f"{name}.{parameter}".lstrip(".") + " (Parameter)" for parameter in own]
    return [*parts, *(f"{count} x {type_}" for type_, count in norms.items())]


def num_int8_layers(int8: nn.Module) -> int:
    """Return how many layers of an int8 network multiply by int8 weights."""
    return sum(has_int8_weights(module) or isinstance(module, DynamicRecurrent) for module in int8.modules())


def int8_parameters_fraction(int8: nn.Module) -> float:
    """Return the fraction of an int8 network's parameters that it computes with as int8."""
    parameters = list(_int8_layer_parameters(int8))
    num_int8 = sum(weight.numel() for weight, _ in parameters)
    num_biases = sum(bias.numel() for _, bias in parameters if bias is not None)
    num_float = sum(parameter.numel() for parameter in int8.parameters())
    return float(num_int8 / max(num_int8 + num_biases + num_float, 1))


def _int8_layer_parameters(int8: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield weight and bias of each int8 layer."""
    for module in int8.modules():
        if isinstance(module, DynamicRecurrent):
            yield from module.weights.values()
        elif has_int8_weights(module):
            layer = cast(Any, module)
            yield layer.weight(), layer.bias()
