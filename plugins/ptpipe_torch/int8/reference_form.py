"""FX's conversion to the reference form, without two things that it does and nothing here needs, and with one more.

It draws initial weights for layers that get others at once. And it runs what computes the weight of a function
(`F.conv2d(x, weight)`), for weights with an observer of their own: here such functions stay float, and the attempt
fails where the computation reads a device or a size from an input (torch 2.13).

Weights are clipped to the integers that they were trained with: engines round to all 8 bits, also where a learned range
has 7.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ptpipe_torch.int8.biases import weighted_part
from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    from torch.ao.nn.quantized import reference as reference_layers
    from torch.ao.quantization.backend_config import BackendConfig
    from torch.ao.quantization.fx.convert import convert

# Those with a method of nn's to draw weights: recurrent ones and embeddings stay float.
_LAYERS: tuple[Any, ...] = (
    reference_layers.Linear,
    *(reference_layers.Conv1d, reference_layers.Conv2d, reference_layers.Conv3d),
    *(reference_layers.ConvTranspose1d, reference_layers.ConvTranspose2d, reference_layers.ConvTranspose3d),
)
_CONVERSION: Any = sys.modules[convert.__module__]  # its package has a function of that name


def reference_form(prepared: GraphModule, backend_config: BackendConfig, **options: Any) -> GraphModule:
    """Convert to reference layers and explicit quantization. Consumes `prepared`."""
    fake_quants = {
        name: fake_quant
        for name, layer in prepared.named_modules()
        if (fake_quant := getattr(layer, "weight_fake_quant", None))
    }
    with _without_initial_weights(), _without_weight_observers():
        reference = convert(prepared, is_reference=True, backend_config=backend_config, **options)
    for name, fake_quant in fake_quants.items():
        layer = weighted_part(reference.get_submodule(name))
        if isinstance(layer, _LAYERS):
            _clip_weights(layer, fake_quant)
    for node in reference.graph.nodes:
        node.meta.pop("target_dtype_info", None)  # which keeps the prepared network's layers, with their weights
    return reference


def _clip_weights(layer: Any, fake_quant: Any) -> None:
    """Clip the weights of a layer to the integers of its fake quantization, where engines would round to others.

    Others are beyond a learned range; without one, the layer keeps sharing its weights with the prepared network.
    """
    scale = layer.weight_scale
    if scale.dim():
        scale = scale.reshape([-1 if axis == layer.weight_axis else 1 for axis in range(layer.weight.dim())])
    weight = layer.weight.detach()
    if (weight / scale).round_().abs_().max() > fake_quant.quant_max:
        clipped = weight.clamp(fake_quant.quant_min * scale, fake_quant.quant_max * scale)
        layer.weight = nn.Parameter(clipped, requires_grad=False)


@contextmanager
def _without_initial_weights() -> Iterator[None]:
    """Let conversion make layers without drawing weights, in whose place it puts those of the prepared network."""
    try:
        for layer in _LAYERS:
            layer.reset_parameters = _do_nothing
        yield
    finally:
        for layer in _LAYERS:
            del layer.reset_parameters


@contextmanager
def _without_weight_observers() -> Iterator[None]:
    original = _CONVERSION._run_weight_observers
    try:
        _CONVERSION._run_weight_observers = _do_nothing
        yield
    finally:
        _CONVERSION._run_weight_observers = original


def _do_nothing(*_args: nn.Module | BackendConfig) -> None:
    """Leave a layer's weights uninitialized, or a network's weights unobserved."""
