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
no input saturates; if not, there is one that does, though perhaps none that the network meets. x_max is 255; weights
of -64 to 64 (`reduce_range`) can't saturate.

Depthwise convolutions and products of two activations (both unsigned) are widened to 16 bits before they are
multiplied, and can't saturate. Activations that are signed (S8S8) would not help: ONNX Runtime shifts them to unsigned
ones when it loads a file on x86, and runs the same kernels.

Shape legend: O outputs of a layer, I input channels of a group, K the reduction axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ptpipe_onnx.file_layers import FileLayer, layers_of
from ptpipe_onnx.graph import Array, int_attribute, producer

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

    @property
    def saturates(self) -> bool:
        """Whether a sum of two products may not fit 16 bits."""
        return self.low < _INT16.min or self.high > _INT16.max


@dataclass(frozen=True)
class Saturation:
    """The bounds of all layers that multiply unsigned activations by signed weights."""

    layers: tuple[LayerBound, ...]

    @property
    def saturating(self) -> tuple[LayerBound, ...]:
        """Layers that can saturate, the largest bound first."""
        found = [layer for layer in self.layers if layer.saturates]
        return tuple(sorted(found, key=lambda layer: -max(layer.high, -layer.low)))

    def __str__(self) -> str:
        """How many layers can saturate, the worst one, and the remedy."""
        worst = self.saturating[0]
        return (
            f"on x86 processors without VNNI, {len(self.saturating)} of {len(self.layers)} int8 layers can saturate, "
            f"{worst.name} the most; for these processors, quantize with `reduce_range: true`"
        )


def saturation_of(graph: ir.Graph, names: Mapping[str, str]) -> Saturation:
    """Return the bounds of a file's layers. `names`: of layers whose weight is named otherwise."""
    bounds = []
    for layer in layers_of(graph):
        if (extremes := _extremes(layer)) is not None:
            low, high = extremes
            bounds.append(LayerBound(names.get(layer.name, layer.name), low * MAX_ACTIVATION, high * MAX_ACTIVATION))
    return Saturation(tuple(bounds))


def _extremes(layer: FileLayer) -> tuple[int, int] | None:
    """Return the extremes of a layer's pairs of weights; None if it does not multiply unsigned activations by them."""
    integers = layer.integers
    if integers is None or layer.kind == "transposed convolution":  # one that has no integer kernel
        return None
    if not _has_unsigned_input(layer.node):
        return None
    if layer.node.op_type in ("Conv", "ConvInteger"):
        if _is_depthwise(layer.node, integers):
            return 0, 0
        weights_OK = np.moveaxis(integers, 1, -1).reshape(len(integers), -1)
    else:
        is_transposed = layer.node.op_type == "Gemm" and int_attribute(layer.node, "transB", (0,)) == (1,)
        weights_OK = integers if is_transposed else np.swapaxes(integers, -1, -2).reshape(-1, integers.shape[-2])
    return pair_extremes(weights_OK)


def pair_extremes(weights_OK: npt.NDArray[np.int8]) -> tuple[int, int]:
    """Return the smallest sum of the negative weights of a pair, and the largest of the positive ones; at most 0, 0."""
    if weights_OK.shape[1] % 2:
        weights_OK = np.pad(weights_OK, ((0, 0), (0, 1)))
    first, second = weights_OK[:, 0::2].astype(np.int16), weights_OK[:, 1::2].astype(np.int16)
    low = np.minimum(first, 0) + np.minimum(second, 0)
    high = np.maximum(first, 0) + np.maximum(second, 0)
    return int(low.min(initial=0)), int(high.max(initial=0))


def _has_unsigned_input(node: ir.Node) -> bool:
    if node.op_type == "DynamicQuantizeLSTM":
        return True
    if node.op_type in _DYNAMIC:
        return producer(node.inputs[0], "DynamicQuantizeLinear") is not None
    dequantize = producer(node.inputs[0], "DequantizeLinear")
    if dequantize is None:
        return False
    zero_point = dequantize.inputs[2] if len(dequantize.inputs) == 3 else None
    return zero_point is None or zero_point.dtype in (None, ir.DataType.UINT8)


def _is_depthwise(node: ir.Node, weights: Array) -> bool:
    return bool(int_attribute(node, "group", (1,)) == (len(weights),) and len(weights) > 1 and weights.shape[1] == 1)
