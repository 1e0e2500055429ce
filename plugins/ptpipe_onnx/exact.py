"""Check that a file has exactly the integers, scales and attributes of its int8 model.

The file is read back and compared, without any tolerance, with torch's int8 network, which is what the other stages
measured, and with the grids of the reference network. For each convolution and linear layer: int8 weights, their scales
and zero points, the int32 bias and its scale, strides, pads, dilations, groups; for each int8 tensor: scale, zero point
and type, wherever the file writes or reads it. Which tensors a layer reads, and all else, is what `layerwise` compares.

Layers of equal integers share one initializer in the file, under the name of one of them. An operator that reads such a
weight must be equal to one of these layers, and each of these layers to one of the operators.

Shape legend: O outputs of a layer, I its inputs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import JSON, StageError
from ptpipe_onnx.exact_layer import Int8Layer
from ptpipe_onnx.graph import Array, consumers, nodes, producer, source
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.hardswish_pass import GateGrid, is_gate
from ptpipe_onnx.subpixel import evaluated, stored_name
from ptpipe_onnx.tensor_names import grid_of, quantize_node_name
from ptpipe_torch.int8.layer_parity import layer_name, quantize_nodes
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.reference_nodes import dequantized, quantized_before

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
        if is_gate(node):
            gate = GateGrid.of(expected)
            if gate is None or not gate.is_written_by(node):
                raise StageError(f"the file's HardSwish of {name} has another factor than relu6(x + 3) / 6")
        elif found != expected:
            raise StageError(f"the file's {node.op_type} of {name} has {found}; the model has {expected}")
        num_grids += 1
    return num_grids


def _layer_calls(reference: GraphModule, int8_network: nn.Module) -> dict[str, Int8Layer]:
    """Return each int8 layer, by the name of its weight in the reference network."""
    modules = {name: module for name, module in int8_network.named_modules() if has_int8_weights(module)}
    layers: dict[str, Int8Layer] = {}
    for node in reference.graph.find_nodes(op="call_module"):
        if (module := modules.get(str(node.target))) is not None:
            is_fused = isinstance(reference.get_submodule(str(node.target)), nn.Sequential)
            weight = f"{node.target}.0.weight" if is_fused else f"{node.target}.weight"
            layers.setdefault(weight, Int8Layer(str(node.target), module, {})).input_grids.update(_input_grids(node))
    return layers


def _input_grids(call: Node) -> Iterator[tuple[str, Grid]]:
    """Yield name and grid of a layer's input; of a tensor that only the reference form requantizes, the former too."""
    quantize = dequantized(call.all_input_nodes[0])
    while quantize is not None:
        yield quantize.name, grid_of(quantize)
        quantize = quantized_before(quantize)


def _layers_alike(layers: Mapping[str, Int8Layer]) -> dict[str, list[Int8Layer]]:
    """Return, by the name of each weight, the layers whose integers are the same, or transposed: a file stores these
    once. Mostly they are calls of one layer that were separated.
    """
    integers = {name: layer.parameters[0].integers for name, layer in layers.items()}
    sums = {name: (array.size, array.sum(dtype=np.int64)) for name, array in integers.items()}
    num_equal = Counter(sums.values())  # of most there is one, which spares the digests
    by_content: dict[Hashable, list[Int8Layer]] = {}
    alike = {}
    for name, layer in layers.items():
        content = _content(integers[name]) if num_equal[sums[name]] > 1 else name
        alike[name] = by_content.setdefault(content, [])
        alike[name].append(layer)
    return alike


def _content(integers: Array) -> Hashable:
    """Return what stands for an array and its transpose."""
    return frozenset((array.shape, hashlib.sha256(array.tobytes()).digest()) for array in (integers, integers.T))


def _equal_layers(node: ir.Node, layers: Sequence[Int8Layer]) -> list[Int8Layer]:
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
