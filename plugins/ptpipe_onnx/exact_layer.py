"""Compare one layer of a file with torch's int8 layer, without any tolerance: integers, scales, attributes.

An int32 bias is b / (s_x s_w), rounded; see `ptpipe_torch.int8.biases`. Some layers the file has in another form, in
which the passes write them; then that form is compared.

Shape legend: O outputs of a layer, I its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from ptpipe import StageError
from ptpipe_onnx.added_channels import PaddedDepthwise, padded_channels
from ptpipe_onnx.graph import Array, constant, int_attribute, only_consumer, producer
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.linear_pass import SequenceLayer
from ptpipe_onnx.repeated_channels import RepeatedChannels
from ptpipe_onnx.subpixel import Subpixel, evaluated, trimmed
from ptpipe_onnx.volumes import KernelAxis, VolumeConvolution, arranged
from ptpipe_torch.int8.biases import coarsening, integer_biases, sum_scales
from ptpipe_torch.int8.layers import QuantizedWeight, quantized_weight

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SIZES = {"strides": "stride", "dilations": "dilation", "output_padding": "output_padding"}
"""Attributes of ONNX's convolutions with one number per axis, and what torch calls them."""


@dataclass(frozen=True)
class Int8Layer:
    """A convolution or linear layer of torch's int8 network."""

    name: str
    module: Any
    input_grids: dict[str, Grid]
    """By the names of the tensors in the reference network."""

    @cached_property
    def parameters(self) -> tuple[QuantizedWeight, Array | None]:
        """Weight and bias, which are unpacked together: that takes milliseconds."""
        weight, bias = self.module._weight_bias()
        return quantized_weight(self.name, weight), None if bias is None else bias.detach().numpy()

    def compare(self, node: ir.Node) -> None:
        """Compare an operator of the file with this layer."""
        if node.op_type == "Conv" and getattr(self.module, "transposed", False):
            _SubpixelLayer.of(self).compare_interleaved(node)
        elif node.op_type == "Conv" and not hasattr(self.module, "kernel_size"):
            _ConvolvedLayer.of(self, node)._compare_product(node)
        elif node.op_type == "Conv" and (volume := VolumeConvolution.of(node)) is not None:
            _VolumeLayer.of(self, volume)._compare_product(node)
        elif node.op_type == "Conv" and (written := PaddedDepthwise.of(node)) is not None:
            _PaddedLayer.of(self, written)._compare_product(node)
        else:
            self._compare_product(node)

    def _compare_product(self, node: ir.Node) -> None:
        if node.op_type not in _PRODUCTS:
            raise self._error("operator", node.op_type, " or ".join(_PRODUCTS))
        dequantize = producer(node.inputs[1], "DequantizeLinear")
        data = producer(node.inputs[0], "DequantizeLinear")
        grid = None if data is None else Grid.of(data)
        if data is None or dequantize is None or grid is None or grid not in self.input_grids.values():
            expected_grids = " or ".join(map(str, self.input_grids.values()))
            raise self._error("input", grid or "float", expected_grids)
        weight = self._weight(node, grid)
        if (pad := producer(data.inputs[0], "Pad")) is not None:
            weight = self._with_padded_input(weight, pad, grid)
        for quantity, index in (("int8 weights", 0), ("weight scales", 1), ("weight zero points", 2)):
            expected = (weight.integers, weight.scales, weight.zero_points)[index]
            self._compare_arrays(quantity, evaluated(dequantize.inputs[index]), expected)
        if weight.per_channel:
            self._compare("axis of the weight scales", int_attribute(dequantize, "axis", (1,)), (weight.axis,))
        self._compare_bias(node, grid, weight)
        self._compare_attributes(node)

    def _weight(self, node: ir.Node, grid: Grid) -> QuantizedWeight:
        """Return the weight in the orientation that the operator reads it in, coarsened as its bias needs."""
        weight, bias_O = self.parameters
        if bias_O is not None and producer(_bias(node), "DequantizeLinear") is not None:
            weight = _coarsened(weight, bias_O, grid)
        is_transposed = node.op_type == "MatMul" or (
            node.op_type == "Gemm" and int_attribute(node, "transB", (0,)) == (0,)
        )
        return weight.transposed() if is_transposed else weight

    def _with_padded_input(self, weight: QuantizedWeight, pad: ir.Node, grid: Grid) -> QuantizedWeight:
        """Return the weight with as many channels as the input has with those that the file appends to it."""
        ends = constant(pad.inputs[1])
        num_added = 0 if ends is None else int(ends.flat[5])
        self._compare_arrays("pads of the input", ends, np.array([0, 0, 0, 0, 0, num_added, 0, 0]))
        self._compare_padding(pad, grid)
        return replace(weight, integers=padded_channels(weight.integers, num_added))

    def _compare_padding(self, pad: ir.Node, grid: Grid) -> None:
        value = constant(pad.inputs[2])
        self._compare("padding of the input", None if value is None else value.item(), int(grid.zero_point))

    def _compare_bias(self, node: ir.Node, grid: Grid, weight: QuantizedWeight) -> None:
        expected_O, value = self.parameters[1], _bias(node)
        dequantize = producer(value, "DequantizeLinear")
        if dequantize is not None and expected_O is not None:
            scales = sum_scales(grid.scale, weight.scales)
            rounded_O = integer_biases(expected_O, scales)
            self._compare_arrays("int32 bias", constant(dequantize.inputs[0]), rounded_O)
            self._compare_arrays("bias scales", constant(dequantize.inputs[1]), scales)
        elif value is not None or (expected_O is not None and expected_O.any()):
            self._compare_arrays("bias", constant(value), np.zeros(1) if expected_O is None else expected_O)

    def _compare_attributes(self, node: ir.Node) -> None:
        if node.op_type in ("Gemm", "MatMul"):
            factors = [node.attributes[name].value for name in ("alpha", "beta") if name in node.attributes]
            self._compare("alpha, beta", factors, [1.0] * len(factors))
            self._compare("transA", int_attribute(node, "transA", (0,)), (0,))
            return
        num_axes = len(self.module.kernel_size)
        self._compare("padding mode", "zeros", self.module.padding_mode)
        self._compare("pads", int_attribute(node, "pads", (0,) * 2 * num_axes), tuple(self.module.padding) * 2)
        self._compare("group", int_attribute(node, "group", (1,)), (self._num_groups(node),))
        for attribute, name in _SIZES.items():
            default = (0 if attribute == "output_padding" else 1,) * num_axes
            self._compare(attribute, int_attribute(node, attribute, default), tuple(getattr(self.module, name)))
        if "auto_pad" in node.attributes:
            self._compare("auto_pad", node.attributes["auto_pad"].value, "NOTSET")

    def _num_groups(self, node: ir.Node) -> int:
        """Return the groups of the file's operator, which has one for each output where channels are repeated."""
        num_groups, num_outputs = int(self.module.groups), int(self.module.out_channels)
        repeated = RepeatedChannels.of(node)
        is_written_so = repeated == RepeatedChannels(num_groups, num_outputs // num_groups)
        return num_outputs if is_written_so and self.module.in_channels == num_groups else num_groups

    def _compare(self, quantity: str, found: object, expected: object) -> None:
        if found != expected:
            raise self._error(quantity, found, expected)

    def _compare_arrays(self, quantity: str, found: Array | None, expected: Array) -> None:
        if found is None:
            raise self._error(quantity, "none", f"an array of shape {expected.shape}")
        if found.shape != expected.shape:
            raise self._error(quantity, f"shape {found.shape}", f"shape {expected.shape}")
        differs = found != expected
        if differs.any():
            first = np.unravel_index(int(differs.argmax()), differs.shape)
            where = f"{found[first]} at {tuple(map(int, first))}, {int(differs.sum())} of {differs.size} differ"
            raise self._error(quantity, where, str(expected[first]))

    def _error(self, quantity: str, found: object, expected: object) -> StageError:
        return StageError(
            f"the file's layer {self.name} is not the model's: its {quantity}: {found}, in the model: {expected}; "
            "leave this layer float (`skip` of quant.prepare) to export the others"
        )


@dataclass(frozen=True)
class _ArrangedLayer(Int8Layer):
    """A convolution whose weight the file has in another form."""

    arranged: tuple[QuantizedWeight, Array | None]
    """Weight and bias as in the file."""

    @cached_property
    def parameters(self) -> tuple[QuantizedWeight, Array | None]:
        return self.arranged


@dataclass(frozen=True)
class _SubpixelLayer(_ArrangedLayer):
    """A transposed convolution that the file computes as a convolution; see `subpixel`."""

    form: Subpixel

    @classmethod
    def of(cls, layer: Int8Layer) -> _SubpixelLayer:
        (weight, bias_O), module = layer.parameters, layer.module
        kernel, pads = trimmed(weight.integers, tuple(module.padding) * 2)
        form = Subpixel.of(kernel.shape[2:], module.stride, pads, module.output_padding)
        if form is None:
            raise layer._error("operator", "Conv", "ConvTranspose")
        repeated = None if bias_O is None else form.repeated(bias_O)
        arranged = replace(weight, integers=form.arranged(kernel)), repeated
        return cls(layer.name, module, layer.input_grids, arranged, form)

    def compare_interleaved(self, node: ir.Node) -> None:
        """Compare the convolution, and the operator that interleaves its outputs."""
        self._compare_product(node)
        if self.form.stride > 1:
            quantize = only_consumer(node.outputs[0], "QuantizeLinear")
            is_interleaved = quantize is not None and self.form.is_interleaved(quantize, self.module.out_channels)
            self._compare("outputs interleaved by the stride", is_interleaved, True)

    def _compare_attributes(self, node: ir.Node) -> None:
        ones = (1,) * len(self.form.axes)
        self._compare("pads", int_attribute(node, "pads", (0,) * 2 * len(ones)), self.form.pads)
        self._compare("group", int_attribute(node, "group", (1,)), (1,))
        for attribute in ("strides", "dilations"):
            self._compare(attribute, int_attribute(node, attribute, ones), ones)


@dataclass(frozen=True)
class _ConvolvedLayer(Int8Layer):
    """A linear layer that the file computes as a convolution; see `linear_pass`."""

    num_axes: int
    """Of the kernel, which has one position."""

    @classmethod
    def of(cls, layer: Int8Layer, convolution: ir.Node) -> _ConvolvedLayer:
        written = SequenceLayer.of(convolution)
        if written is None:
            raise layer._error("operator", "Conv", "a linear layer")
        return cls(layer.name, layer.module, layer.input_grids, written.num_axes)

    def _weight(self, node: ir.Node, grid: Grid) -> QuantizedWeight:
        weight = super()._weight(node, grid)
        return replace(weight, integers=weight.integers.reshape(*weight.integers.shape, *(1,) * self.num_axes))

    def _compare_attributes(self, node: ir.Node) -> None:
        """`SequenceLayer` has."""


@dataclass(frozen=True)
class _PaddedLayer(_ArrangedLayer):
    """A depthwise convolution that has more channels in the file; see `added_channels`."""

    written: PaddedDepthwise

    @classmethod
    def of(cls, layer: Int8Layer, written: PaddedDepthwise) -> _PaddedLayer:
        weight, bias_O = layer.parameters
        ends = (0, written.num_added)
        padded = replace(weight, integers=np.pad(weight.integers, (ends, (0, 0), (0, 0), (0, 0))))
        if weight.per_channel:
            scales, zero_points = np.pad(weight.scales, ends, "edge"), np.pad(weight.zero_points, ends)
            padded = replace(padded, scales=scales, zero_points=zero_points)
        arranged = padded, None if bias_O is None else np.pad(bias_O, ends)
        return cls(layer.name, layer.module, layer.input_grids, arranged, written)

    def _with_padded_input(self, weight: QuantizedWeight, pad: ir.Node, grid: Grid) -> QuantizedWeight:
        self._compare_padding(pad, grid)
        return weight

    def _num_groups(self, node: ir.Node) -> int:
        return super()._num_groups(node) + self.written.num_added


@dataclass(frozen=True)
class _VolumeLayer(_ArrangedLayer):
    """A convolution over volumes that the file computes as one over images; see `volumes`."""

    written: VolumeConvolution

    @classmethod
    def of(cls, layer: Int8Layer, written: VolumeConvolution) -> _VolumeLayer:
        weight, bias_O = layer.parameters
        if weight.integers.ndim != 5:
            raise layer._error("operator", "a convolution over volumes", type(layer.module).__name__)
        arranged_weight = replace(weight, integers=arranged(weight.integers)), bias_O
        return cls(layer.name, layer.module, layer.input_grids, arranged_weight, written)

    def _weight(self, node: ir.Node, grid: Grid) -> QuantizedWeight:
        if self.written.pad is not None:
            self._compare_padding(self.written.pad, grid)
        return super()._weight(node, grid)

    def _compare_attributes(self, node: ir.Node) -> None:
        module = self.module
        axis = KernelAxis(module.kernel_size[0], module.stride[0], module.dilation[0], (module.padding[0],) * 2)
        self._compare("size, stride, dilation and pads of the depth", self.written.axis, axis)
        self._compare("padding mode", "zeros", module.padding_mode)
        self._compare("pads", int_attribute(node, "pads", (0,) * 4), tuple(module.padding[1:]) * 2)
        self._compare("group", int_attribute(node, "group", (1,)), (1,))
        self._compare("groups of the model", module.groups, 1)
        for attribute, name in (("strides", "stride"), ("dilations", "dilation")):
            self._compare(attribute, int_attribute(node, attribute, (1, 1)), tuple(getattr(module, name)[1:]))


def _bias(node: ir.Node) -> ir.Value | None:
    if node.op_type != "MatMul":
        return node.inputs[2] if len(node.inputs) == 3 else None
    add = only_consumer(node.outputs[0], "Add")
    values = [] if add is None else [value for value in add.inputs if value is not node.outputs[0]]
    return values[0] if values and constant(values[0]) is not None else None


def _coarsened(weight: QuantizedWeight, bias_O: Array, grid: Grid) -> QuantizedWeight:
    """Return the weight with larger scales where the bias, on the grid of the products, would be too large."""
    factors = coarsening(bias_O, sum_scales(grid.scale, weight.scales))
    if factors.max() <= 1:
        return weight
    shape = [-1 if weight.per_channel and axis == weight.axis else 1 for axis in range(weight.integers.ndim)]
    integers = np.rint(weight.integers / factors.reshape(shape)).astype(np.int8)
    return QuantizedWeight(integers, weight.scales * factors, weight.zero_points, weight.axis)
