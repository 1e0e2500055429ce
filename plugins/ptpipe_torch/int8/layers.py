"""QAT layers, int8 layers and dynamically quantized layers of `torch.ao.nn`, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.int8_state import stored_as_int8
from ptpipe_torch.int8.observers import NARROW, PlaceholderObserver, make_qconfig, weight_observer

with deprecations_silenced():
    import torch.ao.nn.intrinsic.qat as fused_qat_layers
    import torch.ao.nn.qat as qat_layers
    import torch.ao.nn.quantized.dynamic as dynamic_layers
    from torch.ao.nn.quantized.modules.utils import WeightedQuantizedModule

_NUM_ROWS, _NUM_OUTPUTS = 16, 256
"""How many rows of a dynamic layer's input are compared with its formula; how many outputs at a time."""
_MAX_LEVEL = 255
_UNCERTAIN = 1e-4

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


def has_narrow_weights(int8: nn.Module) -> bool:
    """Return whether no weight of an int8 network is larger than those of `weight_format(narrow=True)`."""
    layers: list[Any] = [layer for layer in int8.modules() if has_int8_weights(layer)]
    return all(layer._weight_bias()[0].int_repr().int().abs().max() <= NARROW for layer in layers)


class DynamicLinear(dynamic_layers.Linear):
    """A dynamically quantized linear layer, called like `nn.Linear`.

    torch's own takes no `input=` and always reduces inputs to 7 bits, which files can't: see `swap_dynamic_linears`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name that nn.Linear gives it
        """Apply the layer to float activations."""
        packed = cast(Any, self._packed_params)._packed_params
        y: torch.Tensor = torch.ops.quantized.linear_dynamic(input, packed, reduce_range=False)
        return y.to(input.dtype)


def swap_dynamic_linears(
    module: nn.Module, names: Iterable[str], *, per_channel: bool, narrow_weights: bool
) -> nn.Module:
    """Replace linear layers, by name, by dynamically quantized ones, in place; return the module.

    `per_channel`: one scale for each output channel's weights. `narrow_weights`: see `weight_format`; inputs have 8
    bits, as those of ONNX's DynamicQuantizeLinear.
    """
    activation = PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True)
    qconfig = make_qconfig(activation, weight_observer(per_channel=per_channel, narrow=narrow_weights))

    def quantized(linear: Any) -> nn.Module:
        linear.qconfig = qconfig
        return cast(nn.Module, cast(Any, DynamicLinear).from_float(linear))

    with deprecations_silenced():
        return replace_layers(module, names, quantized)


@dataclass(frozen=True)
class InputLevels:
    """How engines quantize an input at run time: with a scale and a zero point from the range of the whole tensor."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, x: torch.Tensor) -> InputLevels:
        """Return the levels that engines choose for a float32 tensor of finite values."""
        return cls(*torch._choose_qparams_per_tensor(x))


@dataclass(frozen=True)
class WeightLevels:
    """The integers of a qint8 weight, less their zero points, and its scale or scales, as float64."""

    integers_OI: torch.Tensor
    scale_O: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightLevels:
        """Return those of a weight."""
        integers_OI = weight.int_repr().double()
        if weight.qscheme() is torch.per_tensor_affine:
            scale = torch.tensor(weight.q_scale(), dtype=torch.float64)
            return cls(integers_OI.sub_(weight.q_zero_point()), scale)
        return cls(integers_OI.sub_(weight.q_per_channel_zero_points()[:, None]), weight.q_per_channel_scales())


def expected_product(
    x_RI: torch.Tensor, levels: InputLevels, weight: WeightLevels, bias_O: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a dynamically quantized layer is to compute of some rows, and how far an engine may be from it.

    The formula, in float64: y = (q - z) s W + b, q = clamp(round(x / s) + z), with s and z from the range of x, and W
    the integers of the weight times their scales. Engines sum integers exactly; what they round is, with the unit
    roundoff u = 2**-24:
    - 1 / s, x / s, which is at most 255, and the addition of z: an integer may differ by one where x / s is within
      3 * 256 * u < 1e-4 of halfway between two, which changes y by s |W|;
    - the sum, its products with s and with the weight's scale, and the addition of b: at most 8 u (|y - b| + |b|).
    """
    levels_RI = x_RI.double() / levels.scale
    is_uncertain_RI = (levels_RI - levels_RI.floor() - 0.5).abs() < _UNCERTAIN
    uncertain = is_uncertain_RI.any(0).nonzero().ravel()
    levels_RI = levels_RI.round().clamp(-levels.zero_point, _MAX_LEVEL - levels.zero_point)
    scale_O = levels.scale * weight.scale_O
    sums_RO = levels_RI @ weight.integers_OI.T * scale_O
    uncertain_RO = is_uncertain_RI[:, uncertain].double() @ weight.integers_OI[:, uncertain].T.abs() * scale_O
    bias = torch.zeros(1, dtype=torch.float64) if bias_O is None else bias_O.double()
    return sums_RO + bias, uncertain_RO + 8 * 2**-24 * (sums_RO.abs() + bias.abs())


def dynamic_linear_error(layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest difference of a dynamically quantized layer's output from its formula; 1: all of rounding.

    Formula and rounding are those of `expected_product`. Some rows of x are compared, in all outputs; none of an input
    that has no range.
    """
    if not x.numel() or not x.isfinite().all():
        return 0.0
    linear = cast(Any, layer)
    with deprecations_silenced():
        weight, bias = linear._weight_bias()
    levels = InputLevels.of(x)
    x_RI = x.flatten(0, -2)
    rows = torch.linspace(0, len(x_RI) - 1, min(_NUM_ROWS, len(x_RI))).long()
    error = 0.0
    for first in range(0, linear.out_features, _NUM_OUTPUTS):  # float64 of a whole layer may be gigabytes
        outputs = slice(first, first + _NUM_OUTPUTS)
        bias_O = None if bias is None else bias[outputs]
        expected_RO, allowed_RO = expected_product(x_RI[rows], levels, WeightLevels.of(weight[outputs]), bias_O)
        difference_RO = (y.flatten(0, -2)[rows][:, outputs] - expected_RO).abs()
        error = max(error, (difference_RO / allowed_RO.clamp(min=1e-30)).nan_to_num(torch.inf).max().item())
    return error


def replace_layers(module: nn.Module, names: Iterable[str], replacement: Callable[[Any], nn.Module]) -> nn.Module:
    """Replace submodules, by name, by what `replacement` returns for them, in place; return the module.

    A submodule with two names stays one. An `nn.TransformerEncoderLayer` is set to call its layers: in eval mode it
    would give their weights to one fused operator instead.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for name in names:
        layer = module.get_submodule(name)
        if layer in replaced.values():  # reached through a parent with two names
            continue
        parent_name, _, child = name.rpartition(".")
        parent = module.get_submodule(parent_name)
        if layer not in replaced:
            replaced[layer] = replacement(layer)
        setattr(parent, child, replaced[layer])
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0
    return module


STORABLE_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Embedding, nn.EmbeddingBag, nn.LSTM, nn.GRU, nn.RNN),
)
"""Layers whose weights can be stored as int8 where they compute in float: see `round_weights`."""


def round_weights(module: nn.Module, names: Iterable[str], *, per_channel: bool) -> dict[str, torch.Tensor]:
    """Round the weights of these layers, of `STORABLE_LAYERS`, to int8 values, in place.

    Return quantized tensors by all of their names in the state dict. `per_channel`: of convolutions; rows of tables and
    of recurrent layers have scales of their own in any case.
    """
    rounded: dict[torch.Tensor, torch.Tensor] = {}
    for name in names:
        layer: Any = module.get_submodule(name)
        is_convolution = isinstance(layer, nn.modules.conv._ConvNd)
        axis = 1 if is_convolution and layer.transposed else 0
        for weight in _stored_weights_of(layer):
            if weight not in rounded:  # two layers may share it
                per_row = per_channel or not is_convolution
                rounded[weight] = int8_weight(weight.detach(), per_channel=per_row, axis=axis)
                with torch.no_grad():
                    weight.copy_(rounded[weight].dequantize())
    named = module.named_parameters(remove_duplicate=False)
    return {name: rounded[parameter] for name, parameter in named if parameter in rounded}


def storable_layers(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Return which of these layers, of `STORABLE_LAYERS`, share no weight with a layer that is none of them."""
    names = [name for name in names if _stored_weights_of(module.get_submodule(name))]  # not weight_norm's
    chosen = {module.get_submodule(name) for name in names}
    others = {weight for layer in module.modules() if layer not in chosen for weight in layer._parameters.values()}
    return [name for name in names if others.isdisjoint(_stored_weights_of(module.get_submodule(name)))]


def _stored_weights_of(layer: nn.Module) -> list[nn.Parameter]:
    named = layer._parameters.items()
    weights = [weight for name, weight in named if weight is not None and name.startswith("weight")]
    return [weight for weight in weights if weight.dtype is torch.float32]


def int8_weight(weight: torch.Tensor, *, per_channel: bool, axis: int, narrow: bool = False) -> torch.Tensor:
    """Quantize a weight symmetrically to qint8, with one scale or one for each index along `axis`.

    `narrow`: see `weight_format`.
    """
    with deprecations_silenced():
        observer = weight_observer(per_channel=per_channel, narrow=narrow)(**({"ch_axis": axis} if per_channel else {}))
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

    def with_scale_of_each_row(self) -> QuantizedWeight:
        """Return the same with a scale for each index of axis 0."""
        if self.per_channel:
            return self
        shape = self.integers.shape[:1]
        return replace(self, scales=np.full(shape, self.scales), zero_points=np.full(shape, self.zero_points))

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
    """Return the weights of dynamically quantized linear layers, by all of their names in the float network.

    Raises StageError if there are dynamically quantized layers of other types.
    """
    weights = {}
    for name, layer in converted.named_modules(remove_duplicate=False):
        if isinstance(layer, dynamic_layers.Linear):
            weights[f"{name}.weight"] = quantized_weight(name, cast(Any, layer).weight())
        elif type(layer).__module__.startswith(dynamic_layers.__name__) and "rnn" in type(layer).__module__:
            raise StageError(f"{name} ({type(layer).__name__}) can't be exported as dynamic int8: leave it float")
    return weights


def use_rounded_weights(network: nn.Module, weights: Mapping[str, QuantizedWeight]) -> None:
    """Give parameters of a float network, by name, the values of int8 weights, in place."""
    with torch.no_grad():
        for name, weight in weights.items():
            network.get_parameter(name).copy_(torch.from_numpy(weight.dequantized()))


def stored_weights(packed: Mapping[str, torch.Tensor], converted: nn.Module) -> dict[str, QuantizedWeight]:
    """Return weights that are float in a converted network and int8 in its file, by parameter name."""
    with deprecations_silenced():
        parameters = dict(converted.named_parameters(remove_duplicate=False))  # a state dict would unpack int8 weights
        stored = stored_as_int8(packed, parameters)
        return {name: quantized_weight(name, weight) for name, weight in stored.items()}
