"""Small faults to plant in a written int8 file, each in one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


@dataclass(frozen=True)
class Layer:
    """A Conv or Gemm of integers in a file that may be changed."""

    graph: onnx.GraphProto
    node: onnx.NodeProto

    @property
    def producers(self) -> dict[str, onnx.NodeProto]:
        return {name: node for node in self.graph.node for name in node.output}

    def array(self, index: int, part: int) -> tuple[onnx.TensorProto, np.ndarray]:
        """Integers (part 0) or scales (part 1) of the weight (index 1) or the bias (index 2)."""
        name = self.producers[self.node.input[index]].input[part]
        tensor = next(array for array in self.graph.initializer if array.name == name)
        return tensor, numpy_helper.to_array(tensor).copy()

    def set(self, index: int, part: int, content: np.ndarray) -> bool:
        tensor, before = self.array(index, part)
        tensor.CopyFrom(numpy_helper.from_array(content.astype(before.dtype), tensor.name))
        return bool((content.astype(before.dtype) != before).any())

    @property
    def quantize(self) -> onnx.NodeProto:
        return next(node for node in self.graph.node if node.input and node.input[0] == self.node.output[0])

    def scalar(self, name: str) -> float:
        return numpy_helper.to_array(next(array for array in self.graph.initializer if array.name == name)).item()

    def attribute(self, name: str) -> onnx.AttributeProto | None:
        return next((attribute for attribute in self.node.attribute if attribute.name == name), None)


Fault = Callable[[Layer, np.random.Generator], bool]
"""Changes a layer; returns False where the layer has nothing of the kind to change."""


def bias_zeroed(layer: Layer, rng: np.random.Generator) -> bool:
    return layer.set(2, 0, np.zeros_like(layer.array(2, 0)[1]))


def zero_point_off(by: int) -> Fault:
    def plant(layer: Layer, rng: np.random.Generator) -> bool:
        quantize = layer.quantize
        content = layer.scalar(quantize.input[2])
        changed = content + by if content + by <= 255 else content - by
        name = f"{quantize.input[2]}.changed"
        layer.graph.initializer.append(numpy_helper.from_array(np.array(changed, np.uint8), name))
        quantize.input[2] = name
        return True

    return plant


def one_scale_for_all(layer: Layer, rng: np.random.Generator) -> bool:
    scales = layer.array(1, 1)[1]
    return scales.size > 1 and layer.set(1, 1, np.full_like(scales, scales.mean()))


def scales_swapped(layer: Layer, rng: np.random.Generator) -> bool:
    scales = layer.array(1, 1)[1]
    if scales.size < 2:
        return False
    first, second = rng.choice(scales.size, 2, replace=False)
    scales[[first, second]] = scales[[second, first]]
    return layer.set(1, 1, scales)


def weights_times(factor: float) -> Fault:
    def plant(layer: Layer, rng: np.random.Generator) -> bool:
        return layer.set(1, 1, layer.array(1, 1)[1] * np.float32(factor))

    return plant


def channel_zeroed(layer: Layer, rng: np.random.Generator) -> bool:
    integers = layer.array(1, 0)[1]
    integers[rng.integers(len(integers))] = 0
    return layer.set(1, 0, integers)


def bias_element_off(layer: Layer, rng: np.random.Generator) -> bool:
    """By three steps of the layer's output."""
    bias = layer.array(2, 0)[1]
    grid = np.broadcast_to(layer.array(2, 1)[1], bias.shape)
    index = rng.integers(bias.size)
    bias[index] += round(3 * layer.scalar(layer.quantize.input[1]) / grid[index])
    return layer.set(2, 0, bias)


def bias_element_off_by_one(layer: Layer, rng: np.random.Generator) -> bool:
    """By one step of int32, far below a step of the layer's output: only a comparison of the integers can find it."""
    bias = layer.array(2, 0)[1]
    bias[rng.integers(bias.size)] += 1
    return layer.set(2, 0, bias)


def pads_shifted(layer: Layer, rng: np.random.Generator) -> bool:
    pads = layer.attribute("pads")
    if pads is None or not any(pads.ints):
        return False
    half = len(pads.ints) // 2
    pads.ints[:] = [0] * half + [2 * pad for pad in pads.ints[:half]]
    return True


def dilated(layer: Layer, rng: np.random.Generator) -> bool:
    """With pads that keep the shape of the output."""
    pads, dilations = layer.attribute("pads"), layer.attribute("dilations")
    if pads is None or dilations is None or not any(pads.ints) or set(dilations.ints) != {1}:
        return False
    dilations.ints[:] = [2] * len(dilations.ints)
    pads.ints[:] = [2 * pad for pad in pads.ints]
    return True


FAULTS: dict[str, Fault] = {
    "bias zeroed": bias_zeroed,
    "zero point off by 1": zero_point_off(1),
    "zero point off by 3": zero_point_off(3),
    "one scale for all channels": one_scale_for_all,
    "two scales swapped": scales_swapped,
    "weights x 1.02": weights_times(1.02),
    "weights x 1.1": weights_times(1.1),
    "a channel zeroed": channel_zeroed,
    "a bias off by 3 steps": bias_element_off,
    "a bias off by one": bias_element_off_by_one,
    "pads shifted": pads_shifted,
    "dilated": dilated,
}


def heads_exchanged(graph: onnx.GraphProto, product: onnx.NodeProto) -> None:
    """The first operand is read with its heads in the other order; all shapes and grids stay."""
    dequantize = next(node for node in graph.node if product.input[0] in node.output)
    integers, position = dequantize.input[0], list(graph.node).index(dequantize)
    dequantize.input[0] = f"{integers}.exchanged"
    graph.node.insert(position, onnx.helper.make_node("Concat", ["h1", "h0"], [dequantize.input[0]], axis=1))
    graph.node.insert(position, onnx.helper.make_node("Split", [integers], ["h0", "h1"], axis=1, num_outputs=2))


def operand_scaled(graph: onnx.GraphProto, product: onnx.NodeProto) -> None:
    """The second operand is read with a scale 2 % larger."""
    dequantize = next(node for node in graph.node if product.input[1] in node.output)
    scale = next(numpy_helper.to_array(array) for array in graph.initializer if array.name == dequantize.input[1])
    graph.initializer.append(numpy_helper.from_array(np.array(scale * np.float32(1.02), np.float32), "changed"))
    dequantize.input[1] = "changed"


def result_shifted(graph: onnx.GraphProto, product: onnx.NodeProto) -> None:
    """The result is written with another zero point."""
    quantize = next(node for node in graph.node if product.output[0] in node.input)
    point = next(numpy_helper.to_array(array) for array in graph.initializer if array.name == quantize.input[2])
    changed = point.item() + (1 if point < 255 else -1)
    graph.initializer.append(numpy_helper.from_array(np.array(changed, np.uint8), "changed"))
    quantize.input[2] = "changed"


PRODUCT_FAULTS = {fault.__name__: fault for fault in (heads_exchanged, operand_scaled, result_shifted)}
"""Faults of a product of two activations."""


def broken_files(path: Path, folder: Path, num_faults: int) -> Iterator[tuple[str, Path]]:
    """Yield name and path of up to `num_faults` copies of an int8 file with one fault each, of all kinds in turn."""
    rng, content = np.random.default_rng(3), path.read_bytes()
    num_layers = len(_layers(onnx.ModelProto.FromString(content)))
    turns = [[(name, int(layer)) for layer in rng.permutation(num_layers)] for name in FAULTS]
    number = 0
    for name, index in (place for places in zip(*turns, strict=True) for place in places):
        model = onnx.ModelProto.FromString(content)
        if number == num_faults or not FAULTS[name](_layers(model)[index], rng):
            continue
        broken = folder / f"broken{number}.onnx"
        broken.write_bytes(model.SerializeToString())
        yield f"{name} in layer {index}", broken
        broken.unlink()
        number += 1


def _layers(model: onnx.ModelProto) -> list[Layer]:
    nodes = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm") and len(node.input) == 3]
    return [Layer(model.graph, node) for node in nodes]
