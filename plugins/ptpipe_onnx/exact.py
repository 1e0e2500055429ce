"""Check that a file has exactly the integers, scales and attributes of its int8 model.

The file is read back and compared, without any tolerance, with torch's int8 network, which is what the other stages
measured, and with the grids of the reference network. For each convolution and linear layer: int8 weights, their scales
and zero points, the int32 bias and its scale, strides, pads, dilations, groups; for each int8 tensor: scale, zero point
and type, wherever the file writes or reads it. Which tensors a layer reads, and all else, is what `layerwise` compares.

Layers of equal integers share one initializer in the file, under the name of one of them. An operator that reads such a
weight must be equal to one of these layers, and each of these layers to one of the operators.

An int32 bias is b / (s_x s_w), rounded; see `ptpipe_torch.int8.biases`.

Shape legend: O outputs of a layer, I its inputs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import JSON, StageError
from ptpipe_onnx.graph import Array, constant, consumers, int_attribute, nodes, only_consumer, producer, source
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.latency_passes import padded_channels
from ptpipe_onnx.linear_pass import SequenceLayer
from ptpipe_onnx.subpixel import Subpixel, evaluated, stored_name, trimmed
from ptpipe_onnx.tensor_names import grid_of, quantize_node_name
from ptpipe_torch.int8.biases import coarsening, integer_biases, sum_scales
from ptpipe_torch.int8.layer_parity import layer_name, quantize_nodes
from ptpipe_torch.int8.layers import QuantizedWeight, has_int8_weights, quantized_weight
from ptpipe_torch.int8.reference_nodes import dequantized, quantized_before

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SIZES = {"strides": "stride", "dilations": "dilation", "output_padding": "output_padding"}
"""Attributes of ONNX's convolutions with one number per axis, and what torch calls them."""
_WEIGHT = ".weight"


@dataclass(frozen=True)
class ExactParity:
    """What was compared."""

    num_layers: int
    num_grids: int
    """Of all QuantizeLinear and DequantizeLinear of activations."""

    @property
    def figures(self) -> Mapping[str, JSON]:
        """Recorded figures."""
        return {"layers_identical": self.num_layers, "grids_identical": self.num_grids}


def compare_exactly(path: Path, reference: GraphModule, int8_network: nn.Module) -> ExactParity:
    """Compare the file with the int8 network and the reference network.

    Raises StageError, naming layer and attribute, at the first difference.
    """
    graph = ir.load(path).graph
    num_grids = _compare_grids(graph, reference)
    layers = _layer_calls(reference, int8_network)
    alike = _layers_alike(layers)
    found = _weighted_nodes(graph)
    for name in {name for name, _ in found} - layers.keys():
        raise StageError(f"the file has int8 weights {name}, the model has no such int8 layer")
    compared = {layer.name for name, node in found for layer in _equal_layers(node, alike[name])}
    for name, layer in layers.items():
        if layer.name not in compared:
            raise StageError(f"the file has no int8 layer {layer.name} with the weights {name}, which the model has")
    return ExactParity(len(layers), num_grids)


def _compare_grids(graph: ir.Graph, reference: GraphModule) -> int:
    """Compare the grid at each QuantizeLinear and DequantizeLinear of an activation; return how many there are."""
    quantizes = {node.name: node for node in quantize_nodes(reference)}
    num_grids = 0
    for node in nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        value = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
        assert value is not None
        if evaluated(value) is not None:
            continue
        quantize, found = quantizes.get(quantize_node_name(value)), Grid.of(node)
        if quantize is None:
            raise StageError(f"the file quantizes a tensor {value.name} that is float in the model")
        name, expected = layer_name(quantize, reference), grid_of(quantize)
        if found != expected:
            raise StageError(f"the file's {node.op_type} of {name} has {found}; the model has {expected}")
        num_grids += 1
    return num_grids


def _layer_calls(reference: GraphModule, int8_network: nn.Module) -> dict[str, _Layer]:
    """Return each int8 layer, by the name of its weight in the reference network."""
    modules = {name: module for name, module in int8_network.named_modules() if has_int8_weights(module)}
    layers: dict[str, _Layer] = {}
    for node in reference.graph.find_nodes(op="call_module"):
        if (module := modules.get(str(node.target))) is not None:
            is_fused = isinstance(reference.get_submodule(str(node.target)), nn.Sequential)
            weight = f"{node.target}.0.weight" if is_fused else f"{node.target}.weight"
            layers.setdefault(weight, _Layer(str(node.target), module, {})).input_grids.update(_input_grids(node))
    return layers


def _input_grids(call: Node) -> Iterator[tuple[str, Grid]]:
    """Yield name and grid of a layer's input; of a tensor that only the reference form requantizes, the former too."""
    quantize = dequantized(call.all_input_nodes[0])
    while quantize is not None:
        yield quantize.name, grid_of(quantize)
        quantize = quantized_before(quantize)


def _layers_alike(layers: Mapping[str, _Layer]) -> dict[str, list[_Layer]]:
    """Return, by the name of each weight, the layers whose integers are the same, or transposed: a file stores these
    once. Mostly they are calls of one layer that were separated.
    """
    integers = {name: layer.parameters[0].integers for name, layer in layers.items()}
    sums = {name: (array.size, array.sum(dtype=np.int64)) for name, array in integers.items()}
    num_equal = Counter(sums.values())  # of most there is one, which spares the digests
    by_content: dict[Hashable, list[_Layer]] = {}
    alike = {}
    for name, layer in layers.items():
        content = _content(integers[name]) if num_equal[sums[name]] > 1 else name
        alike[name] = by_content.setdefault(content, [])
        alike[name].append(layer)
    return alike


def _content(integers: Array) -> Hashable:
    """Return what stands for an array and its transpose."""
    return frozenset((array.shape, hashlib.sha256(array.tobytes()).digest()) for array in (integers, integers.T))


def _equal_layers(node: ir.Node, layers: Sequence[_Layer]) -> list[_Layer]:
    """Return which of these layers an operator of the file is; raise StageError if it is none of them."""
    data = producer(node.inputs[0], "DequantizeLinear")
    tensor = "" if data is None else quantize_node_name(source(data))
    refusals: dict[str, StageError] = {}
    for layer in sorted(layers, key=lambda layer: tensor not in layer.input_grids):
        try:
            layer.compare(node)
        except StageError as error:
            refusals[layer.name] = error
    if len(refusals) == len(layers):
        raise next(iter(refusals.values()))
    return [layer for layer in layers if layer.name not in refusals]


def _weighted_nodes(graph: ir.Graph) -> list[tuple[str, ir.Node]]:
    """Return the operators that read an int8 weight through a DequantizeLinear, with the weight's name."""
    found: list[tuple[str, ir.Node]] = []
    for node in nodes(graph, "DequantizeLinear"):
        integers = evaluated(node.inputs[0])
        if integers is not None and integers.dtype == np.int8:
            name = stored_name(source(node))
            layer = name[: name.rfind(_WEIGHT)] + _WEIGHT if _WEIGHT in name else name
            found.extend((layer, reader) for reader in consumers(node.outputs[0]))
    return found


@dataclass(frozen=True)
class _Layer:
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
        ends, value = (constant(operand) for operand in pad.inputs[1:])
        num_added = 0 if ends is None else int(ends.flat[5])
        self._compare_arrays("pads of the input", ends, np.array([0, 0, 0, 0, 0, num_added, 0, 0]))
        self._compare("padding of the input", None if value is None else value.item(), int(grid.zero_point))
        return replace(weight, integers=padded_channels(weight.integers, num_added))

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
        self._compare("group", int_attribute(node, "group", (1,)), (self.module.groups,))
        for attribute, name in _SIZES.items():
            default = (0 if attribute == "output_padding" else 1,) * num_axes
            self._compare(attribute, int_attribute(node, attribute, default), tuple(getattr(self.module, name)))
        if "auto_pad" in node.attributes:
            self._compare("auto_pad", node.attributes["auto_pad"].value, "NOTSET")

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
class _SubpixelLayer(_Layer):
    """A transposed convolution that the file computes as a convolution; see `subpixel`."""

    form: Subpixel
    arranged: tuple[QuantizedWeight, Array | None]
    """Weight and bias of the convolution."""

    @classmethod
    def of(cls, layer: _Layer) -> _SubpixelLayer:
        (weight, bias_O), module = layer.parameters, layer.module
        kernel, pads = trimmed(weight.integers, tuple(module.padding) * 2)
        form = Subpixel.of(kernel.shape[2:], module.stride, pads, module.output_padding)
        if form is None:
            raise layer._error("operator", "Conv", "ConvTranspose")
        repeated = None if bias_O is None else bias_O.repeat(form.repeats)
        arranged = replace(weight, integers=form.arranged(kernel)), repeated
        return cls(layer.name, module, layer.input_grids, form, arranged)

    @cached_property
    def parameters(self) -> tuple[QuantizedWeight, Array | None]:
        return self.arranged

    def compare_interleaved(self, node: ir.Node) -> None:
        """Compare the convolution, and the operator that interleaves its outputs."""
        self._compare_product(node)
        if self.form.stride > 1:
            quantize = only_consumer(node.outputs[0], "QuantizeLinear")
            behind = None if quantize is None else only_consumer(quantize.outputs[0], "DepthToSpace")
            mode = None if behind is None else behind.attributes["mode"].value
            size = (0,) if behind is None else int_attribute(behind, "blocksize", (0,))
            self._compare("DepthToSpace", (size, mode), ((self.form.stride,), "CRD"))

    def _compare_attributes(self, node: ir.Node) -> None:
        self._compare("pads", int_attribute(node, "pads", (0,) * 4), self.form.pads)
        self._compare("group", int_attribute(node, "group", (1,)), (1,))
        for attribute in ("strides", "dilations"):
            self._compare(attribute, int_attribute(node, attribute, (1, 1)), (1, 1))


@dataclass(frozen=True)
class _ConvolvedLayer(_Layer):
    """A linear layer that the file computes as a convolution; see `linear_pass`."""

    num_axes: int
    """Of the kernel, which has one position."""

    @classmethod
    def of(cls, layer: _Layer, convolution: ir.Node) -> _ConvolvedLayer:
        written = SequenceLayer.of(convolution)
        if written is None:
            raise layer._error("operator", "Conv", "a linear layer")
        return cls(layer.name, layer.module, layer.input_grids, written.num_axes)

    def _weight(self, node: ir.Node, grid: Grid) -> QuantizedWeight:
        weight = super()._weight(node, grid)
        return replace(weight, integers=weight.integers.reshape(*weight.integers.shape, *(1,) * self.num_axes))

    def _compare_attributes(self, node: ir.Node) -> None:
        """`SequenceLayer` has."""


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
