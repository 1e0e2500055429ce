"""Layers of a file whose sums can saturate on x86 processors without VNNI.

Without VNNI, ONNX Runtime multiplies unsigned activations x by signed weights w with `vpmaddubsw` (SSE4.1, AVX2 and
AVX-512 kernels of its library MLAS): it adds the products of two neighbors along the reduction axis, x_k w_k +
x_(k+1) w_(k+1) for even k, in 16 signed bits, and what does not fit becomes -32,768 or 32,767. All further sums have
32 bits. With VNNI (`vpdpbusd`), and on ARM, there is no such step.

The reduction axis of a linear layer is its inputs, in order. For a convolution ONNX Runtime lays images and weights out
with channels last, so that the axis runs over the channels of a group, for one position of the kernel after another;
neighbors are two channels, or the last of one position and the first of the next if their number is odd. A last one
without neighbor adds zero.

Hence the exact worst case of a layer with activations in [0, x_max]: each pair reaches

    x_max (max(w_k, 0) + max(w_(k+1), 0))   and   x_max (min(w_k, 0) + min(w_(k+1), 0)),

where activations are x_max at the weights of one sign and 0 at the others. If the extremes over all pairs fit 16 bits,
no input saturates; if not, there is one that does, though perhaps none that the network meets. x_max is 255, or 127
where the range was calibrated to 7 bits (`reduce_range`): an activation beyond its calibrated range exceeds 127.

Depthwise convolutions and products of two activations (both unsigned) are widened to 16 bits before they are
multiplied, and can't saturate. Activations that are signed (S8S8) would not help: ONNX Runtime shifts them to unsigned
ones when it loads a file on x86, and runs the same kernels.

Shape legend: O outputs of a layer, I input channels of a group, K the reduction axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ptpipe_onnx.file_layers import FileLayer, layers_of
from ptpipe_onnx.graph import Array, int_attribute, producer, source
from ptpipe_onnx.tensor_names import quantize_node_name

MAX_ACTIVATION = 255
_INT16 = np.iinfo(np.int16)
_DYNAMIC = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM")
"""Operators whose inputs are quantized at run time."""


@dataclass(frozen=True)
class LayerBound:
    """The extreme sums of two products in a layer."""

    name: str
    low: int
    high: int
    """With activations up to the end of their calibrated range."""
    is_exact_beyond: bool
    """Whether no activation of a byte saturates either."""

    @property
    def saturates(self) -> bool:
        """Whether a sum of two products may not fit 16 bits, for inputs within the calibrated ranges."""
        return not _fits(self.low, self.high)


@dataclass(frozen=True)
class Saturation:
    """The bounds of all layers that multiply unsigned activations by signed weights."""

    layers: tuple[LayerBound, ...]

    @property
    def saturating(self) -> tuple[LayerBound, ...]:
        """Layers that can saturate, the largest bound first."""
        found = [layer for layer in self.layers if layer.saturates]
        return tuple(sorted(found, key=lambda layer: -max(layer.high, -layer.low)))

    @property
    def is_exact_beyond(self) -> bool:
        """Whether no layer can saturate, whatever the activations are."""
        return all(layer.is_exact_beyond for layer in self.layers)

    def __str__(self) -> str:
        """How many layers can saturate, the worst one, and the remedy."""
        worst = self.saturating[0]
        return (
            f"on x86 processors without VNNI, {len(self.saturating)} of {len(self.layers)} int8 layers can saturate, "
            f"{worst.name} the most; for these processors, quantize with `reduce_range: true`"
        )


def saturation_of(graph: ir.Graph, largest: Mapping[str, int], names: Mapping[str, str]) -> Saturation:
    """Return the bounds of a file's layers.

    `largest`: the largest calibrated integer of tensors, by the name of their quantize node; else 255. `names`: of
    layers whose weight is named otherwise.
    """
    layers = (replace(layer, name=names.get(layer.name, layer.name)) for layer in layers_of(graph))
    bounds = (_bound(layer, largest) for layer in layers)
    return Saturation(tuple(bound for bound in bounds if bound is not None))


def _bound(layer: FileLayer, largest: Mapping[str, int]) -> LayerBound | None:
    integers = layer.integers
    if integers is None or layer.kind == "transposed convolution":  # one that has no integer kernel
        return None
    calibrated = _largest_activation(layer.node, largest)
    if calibrated is None:
        return None
    if layer.node.op_type in ("Conv", "ConvInteger"):
        if _is_depthwise(layer.node, integers):
            return LayerBound(layer.name, 0, 0, is_exact_beyond=True)
        weights_OK = np.moveaxis(integers, 1, -1).reshape(len(integers), -1)
    else:
        is_transposed = layer.node.op_type == "Gemm" and int_attribute(layer.node, "transB", (0,)) == (1,)
        weights_OK = integers if is_transposed else np.swapaxes(integers, -1, -2).reshape(-1, integers.shape[-2])
    low, high = pair_extremes(weights_OK)
    is_exact_beyond = _fits(low * MAX_ACTIVATION, high * MAX_ACTIVATION)
    return LayerBound(layer.name, low * calibrated, high * calibrated, is_exact_beyond)


def pair_extremes(weights_OK: npt.NDArray[np.int8]) -> tuple[int, int]:
    """Return the smallest sum of the negative weights of a pair, and the largest of the positive ones; at most 0, 0."""
    if weights_OK.shape[1] % 2:
        weights_OK = np.pad(weights_OK, ((0, 0), (0, 1)))
    first, second = weights_OK[:, 0::2].astype(np.int16), weights_OK[:, 1::2].astype(np.int16)
    low = np.minimum(first, 0) + np.minimum(second, 0)
    high = np.maximum(first, 0) + np.maximum(second, 0)
    return int(low.min(initial=0)), int(high.max(initial=0))


def _largest_activation(node: ir.Node, largest: Mapping[str, int]) -> int | None:
    """Return the largest integer of a layer's input; None if it is float or signed."""
    if node.op_type == "DynamicQuantizeLSTM":
        return MAX_ACTIVATION
    if node.op_type in _DYNAMIC:
        return MAX_ACTIVATION if producer(node.inputs[0], "DynamicQuantizeLinear") is not None else None
    dequantize = producer(node.inputs[0], "DequantizeLinear")
    if dequantize is None:
        return None
    zero_point = dequantize.inputs[2] if len(dequantize.inputs) == 3 else None
    if zero_point is not None and zero_point.dtype not in (None, ir.DataType.UINT8):
        return None
    return largest.get(quantize_node_name(source(dequantize)), MAX_ACTIVATION)


def _is_depthwise(node: ir.Node, weights: Array) -> bool:
    return bool(int_attribute(node, "group", (1,)) == (len(weights),) and len(weights) > 1 and weights.shape[1] == 1)


def _fits(low: int, high: int) -> bool:
    return _INT16.min <= low and high <= _INT16.max
