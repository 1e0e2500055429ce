"""Biases of int8 layers, rounded so that every engine adds the same integer.

A layer computes s (sum_i x_i w_i + n) from the integers x_i of its input and w_i of its weights, where s = s_x s_w is
the product of their scales and n = b / s, rounded (B. Jacob et al., CVPR 2018, section 2.4). ONNX's integer operators
add n as an int32. torch's engines are given b as float32: qnnpack rounds b / s to an integer; fbgemm adds, unrounded,
the float32 quotient b / s, or the product of b and the float32 reciprocal of s where all weights have one scale (torch
2.13). An unrounded bias moves values that lie close to a tie to the other side of it, and one such value in an early
layer moves others in every layer behind it. Hence b is replaced by a float32 number that gives one integer in all of
these ways.

Shape legend: O outputs of a layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.reference_nodes import dequantized, quantized_before

with deprecations_silenced():
    from torch.ao.nn.quantized.reference.modules.utils import ReferenceQuantizedModule

Floats: TypeAlias = npt.NDArray[np.float32]

MAX_BIAS = 2**30
"""Limit of the integers: the sum of a bias and of products must fit int32."""
_SHIFTS = (0, *(sign * shift for shift in range(1, 9) for sign in (1, -1)))
"""How many integers from the nearest one others are tried. Most have a float32 number that gives them."""
_ROUNDINGS = (0, 1, -1)
_LARGE = 2**12
"""Integers from which on some units more or less are nothing beside the bias; below, the last bit decides no tie."""
_ROUNDED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)


def sum_scales(input_scale: float | np.float32, weight_scales: npt.ArrayLike) -> Floats:
    """Return the scales of a layer's sums of products, as engines compute them: in float32."""
    return np.asarray(np.float32(input_scale) * np.asarray(weight_scales, np.float32))


def integer_biases(bias_O: Floats, scales: Floats) -> npt.NDArray[np.int32]:
    """Return biases as integers. `scales`: of the sums that they are added to, one or one for each output.

    The quotient is a float32 number, as fbgemm's is: rounding keeps integers that `exact_biases` chose.
    """
    integers_O: npt.NDArray[np.int32] = np.rint(bias_O.astype(np.float32) / scales).astype(np.int32)
    return integers_O


def coarsening(bias_O: Floats, scales: Floats) -> Floats:
    """Return by what to multiply the weight scales so that no integer of a bias exceeds `MAX_BIAS`; mostly 1.

    A bias beyond it is 2**30 times the scale of the products: the channel's weights are almost zero. Coarser ones
    change its sum by less than num_products * 127 / 2**30 of the bias. Powers of two, so that scales stay exact. Of
    the shape of `scales`.
    """
    mantissas, exponents = np.frexp(np.abs(bias_O.astype(np.float64)) / scales / MAX_BIAS)
    exponents = np.maximum(np.where(mantissas == 0.5, exponents - 1, exponents), 0)
    return np.asarray(np.ldexp(1.0, exponents if np.ndim(scales) else exponents.max(initial=0)), np.float32)


def exact_biases(bias_O: Floats, scales: Floats) -> Floats:
    """Return float32 biases close to these that every engine turns into the same integers, those of `integer_biases`.

    They differ by half of the sums' scale at most, by some times as much where no float32 number gives the nearest
    integer. Of some channels in a thousand none of the integers tried has such a number; fbgemm then adds one that is
    off by its last bit.
    """
    scales_O = np.broadcast_to(scales, bias_O.shape)
    nearest_O = np.rint(bias_O / scales_O)
    found_O: Floats = nearest_O * scales_O
    is_found_O = np.zeros(bias_O.shape, bool)
    for integers_O, candidates_O in _candidates(nearest_O, scales_O):
        is_allowed_O = (np.abs(nearest_O) >= _LARGE) | (integers_O == nearest_O)
        is_new_O = (quotients(candidates_O, scales) == integers_O) & is_allowed_O & ~is_found_O
        found_O, is_found_O = np.where(is_new_O, candidates_O, found_O), is_found_O | is_new_O
        if is_found_O.all():
            break
    return found_O


def quotients(bias_O: Floats, scales: Floats) -> Floats:
    """Return what fbgemm adds to the sums."""
    return np.asarray(bias_O / scales if np.ndim(scales) else bias_O * (np.float32(1) / scales))


def _candidates(nearest_O: Floats, scales_O: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield integers and float32 numbers close to their products with the scale, the nearest integers first."""
    steps_O: Any = np.maximum(np.spacing(np.abs(nearest_O)), np.float32(1))  # beyond 2**24: not every integer
    for shift in _SHIFTS:
        integers_O = nearest_O + np.float32(shift) * steps_O
        products_O = integers_O * scales_O
        gaps_O: Any = np.spacing(products_O)
        for rounding in _ROUNDINGS:
            yield integers_O, products_O + np.float32(rounding) * gaps_O


def round_biases(reference: GraphModule) -> None:
    """Round the biases of a network in torch's reference form, in place.

    Of convolutions and linear layers. Where a bias would not fit, the layer's weights get larger scales. Transposed
    convolutions of one or three dimensions, which no runtime sums in integers, stay as they are; so do layers that are
    called more than once, whose integers differ by the scale of the input.
    """
    calls: dict[Any, list[Node]] = defaultdict(list)
    for node in reference.graph.find_nodes(op="call_module"):
        layer = weighted_part(reference.get_submodule(str(node.target)))
        if all(isinstance(layer, type_) for type_ in (ReferenceQuantizedModule, _ROUNDED_LAYERS)):
            calls[layer].append(node)
    for layer, nodes in calls.items():
        scale = _input_scale(reference, nodes[0])
        if len(nodes) == 1 and scale is not None and layer.bias is not None:
            with np.errstate(all="ignore"):  # a network to load stored integers into has weights of any size
                _round_bias(layer, scale)


def weighted_part(layer: nn.Module) -> nn.Module:
    """Return the layer with weights of a layer that may be fused with ReLU."""
    return layer[0] if isinstance(layer, nn.Sequential) and len(layer) else layer


def _input_scale(reference: GraphModule, call: Node) -> float | None:
    """Return the scale of a layer's input in the int8 form, where only dropout's input is quantized, not its output."""
    found, quantize = None, dequantized(call.all_input_nodes[0])
    while quantize is not None:
        found, quantize = quantize, quantized_before(quantize)
    return None if found is None else _scale(reference, found)


def _scale(reference: GraphModule, quantize: Node) -> float | None:
    if quantize.target is not torch.quantize_per_tensor:
        return None
    scale: Any = quantize.args[1]
    return float(reference.get_buffer(str(scale.target)).item())


def _round_bias(layer: Any, input_scale: float) -> None:
    per_channel = layer.weight_qscheme in (torch.per_channel_affine, torch.per_channel_symmetric)
    weight_scales = layer.weight_scale.numpy().astype(np.float32).reshape(-1 if per_channel else ())
    bias_O = layer.bias.detach().numpy()
    if not (np.isfinite(bias_O).all() and np.isfinite(weight_scales).all()):
        return  # conversion's own checks name the layer
    factors = coarsening(bias_O, sum_scales(input_scale, weight_scales))
    if factors.max() > 1:
        weight_scales = np.asarray(weight_scales * factors)
        layer.weight_scale = torch.from_numpy(weight_scales.reshape(layer.weight_scale.shape))
    rounded_O = exact_biases(bias_O, sum_scales(input_scale, weight_scales))
    layer.bias = nn.Parameter(torch.from_numpy(rounded_O), requires_grad=False)
