"""QAT layers, int8 layers and dynamically quantized layers of `torch.ao.nn`, and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.int8_state import stored_as_int8
from ptpipe_torch.int8.observers import PlaceholderObserver, make_qconfig, weight_observer

with deprecations_silenced():
    import torch.ao.nn.intrinsic.qat as fused_qat_layers
    import torch.ao.nn.qat as qat_layers
    import torch.ao.nn.quantized.dynamic as dynamic_layers
    from torch.ao.nn.quantized.modules.utils import WeightedQuantizedModule

_QAT_LAYERS: Mapping[type[nn.Module], bool] = {
    getattr(home, name + dimensions): "ReLU" in name
    for home, name in (
        (qat_layers, "Conv"),
        (fused_qat_layers, "ConvReLU"),
        (fused_qat_layers, "ConvBn"),
        (fused_qat_layers, "ConvBnReLU"),
    )
    for dimensions in ("1d", "2d", "3d")
    if hasattr(home, name + dimensions)
} | {qat_layers.Linear: False, fused_qat_layers.LinearReLU: True, fused_qat_layers.LinearBn1d: False}


def fused_relu(layer: nn.Module) -> bool | None:
    """Return whether a QAT layer, which fake-quantizes its weights, is fused with ReLU; None for all other layers."""
    return _QAT_LAYERS.get(type(layer))


def folded_weight(layer: nn.Module) -> torch.Tensor:
    """Return the weight that a QAT layer has in int8, before rounding: with its batch norm folded in."""
    with deprecations_silenced():
        folded: Any = cast(Any, layer).to_float()
    layer = folded[0] if isinstance(folded, nn.Sequential) else folded
    return cast(torch.Tensor, layer.weight)


def has_int8_weights(module: nn.Module) -> bool:
    """Return whether a module is an int8 convolution or linear layer; dynamically quantized ones are."""
    return isinstance(module, WeightedQuantizedModule)


class FullRangeLinear(dynamic_layers.Linear):
    """A dynamically quantized linear layer with 8-bit inputs; torch's own always reduces them to 7 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to float activations."""
        packed = cast(Any, self._packed_params)._packed_params
        y: torch.Tensor = torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False)
        return y.to(x.dtype)


def swap_dynamic_linears(
    module: nn.Module, names: Iterable[str], *, per_channel: bool, reduce_range: bool
) -> nn.Module:
    """Replace linear layers, by name, by dynamically quantized ones, in place; return the module.

    `per_channel`: one scale for each output channel's weights. `reduce_range`: quantize inputs to 7 bits.
    """
    activation = PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True)
    layer_type: Any = dynamic_layers.Linear if reduce_range else FullRangeLinear
    with deprecations_silenced():
        for name in names:
            linear: Any = module.get_submodule(name)
            linear.qconfig = make_qconfig(activation, weight_observer(per_channel=per_channel))
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, layer_type.from_float(linear))
    return module


def round_weights(module: nn.Module, names: Iterable[str], *, per_channel: bool) -> dict[str, torch.Tensor]:
    """Round the weights of convolutions to int8 values, in place; return quantized tensors by state dict name."""
    quantized = {}
    for name in names:
        layer: Any = module.get_submodule(name)
        weight = int8_weight(layer.weight.detach(), per_channel=per_channel, axis=1 if layer.transposed else 0)
        quantized[f"{name}.weight"] = weight
        with torch.no_grad():
            layer.weight.copy_(weight.dequantize())
    return quantized


def int8_weight(weight: torch.Tensor, *, per_channel: bool, axis: int) -> torch.Tensor:
    """Quantize a weight symmetrically to qint8, with one scale or one for each index along `axis`."""
    with deprecations_silenced():
        observer = weight_observer(per_channel=per_channel)(**({"ch_axis": axis} if per_channel else {}))
        observer(weight)
        scales, zero_points = observer.calculate_qparams()
        if per_channel:
            return torch.quantize_per_channel(weight, scales, zero_points, axis, torch.qint8)
        return torch.quantize_per_tensor(weight, scales.item(), int(zero_points.item()), torch.qint8)


@dataclass(frozen=True)
class QuantizedWeight:
    """An int8 weight as plain arrays: value = (integer - zero point) * scale."""

    integers: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    """Of shape () for the whole tensor, or one for each index of `axis`."""
    zero_points: npt.NDArray[np.int8]
    """Of the shape of `scales`."""
    axis: int = 0

    @property
    def per_channel(self) -> bool:
        """Whether each channel has its own scale."""
        return self.scales.ndim == 1

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Return the float32 values."""
        shape = [-1 if self.per_channel and axis == self.axis else 1 for axis in range(self.integers.ndim)]
        scales, zero_points = self.scales.reshape(shape), self.zero_points.reshape(shape).astype(np.float32)
        return (self.integers - zero_points) * scales

    def transposed(self) -> QuantizedWeight:
        """Return the transpose of a matrix."""
        return QuantizedWeight(self.integers.T, self.scales, self.zero_points, 1 - self.axis)


def quantized_weight(name: str, weight: torch.Tensor) -> QuantizedWeight:
    """Return a layer's quantized tensor as plain arrays. Raises StageError, naming the layer, if it is not qint8."""
    if not weight.is_quantized or weight.dtype is not torch.qint8:
        raise StageError(f"the weight of {name} is {weight.dtype}; only int8 weights can be exported")
    per_channel = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
    scales = weight.q_per_channel_scales() if per_channel else torch.tensor(weight.q_scale())
    zero_points = weight.q_per_channel_zero_points() if per_channel else torch.tensor(weight.q_zero_point())
    return QuantizedWeight(
        weight.int_repr().numpy(),
        scales.numpy().astype(np.float32),
        zero_points.numpy().astype(np.int8),
        weight.q_per_channel_axis() if per_channel else 0,
    )


def dynamic_weights(converted: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the weights of dynamically quantized linear layers, by the float network's parameter name.

    Raises StageError if there are dynamically quantized layers of other types.
    """
    weights = {}
    for name, layer in converted.named_modules():
        if isinstance(layer, dynamic_layers.Linear):
            weights[f"{name}.weight"] = quantized_weight(name, cast(Any, layer).weight())
        elif type(layer).__module__.startswith(dynamic_layers.__name__) and "rnn" in type(layer).__module__:
            raise StageError(f"{name} ({type(layer).__name__}) can't be exported as dynamic int8: leave it float")
    return weights


def stored_weights(packed: Mapping[str, torch.Tensor], converted: nn.Module) -> dict[str, QuantizedWeight]:
    """Return weights that are float in a converted network and int8 in its file, by parameter name."""
    with deprecations_silenced():
        stored = stored_as_int8(packed, converted.state_dict())
        return {name: quantized_weight(name, weight) for name, weight in stored.items()}
