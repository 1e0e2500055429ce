"""Bring a graph with quantize and dequantize pairs into the form that runs in integer kernels.

What arrives here is torch's reference form: every operator computes in float between a DequantizeLinear (DQ) and a
QuantizeLinear (Q). A runtime fuses DQ-operator-Q into an integer kernel only where nothing else stands between.
Every rewrite below leaves the numbers as they are, with one exception that is named where it is made (biases).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptpipe_onnx.graph import (
    Array,
    Graph,
    Node,
    Value,
    add_constant,
    add_node,
    constant,
    consumers,
    first_consumer,
    integers,
    nodes,
    only_consumer,
    producer,
    remove_unused,
    replace,
)

_MOVES = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Split", "Slice", "Gather")
"""Operators that hand on some of the values they get, unchanged: what they do to floats they can do to integers."""
_CLIPS = ("Relu", "Clip")
_INT32_ROOM = 2**30
"""Biases are kept below this, so that a bias and a sum of products fit int32 together."""


@dataclass(frozen=True)
class Grid:
    """The values that a quantized tensor can take: (integer - zero point) * scale."""

    scale: np.float32
    zero_point: int
    dtype: np.dtype[np.generic]

    @classmethod
    def of(cls, node: Node) -> Grid | None:
        """The grid of a QuantizeLinear or DequantizeLinear; None where it is per channel or not constant."""
        scale, zero_point = (constant(value) for value in node.inputs[1:3])
        if scale is None or zero_point is None or scale.size != 1:
            return None
        return cls(np.float32(scale.item()), int(zero_point.item()), zero_point.dtype)

    @property
    def limits(self) -> tuple[int, int]:
        """Least and greatest integer."""
        info = np.iinfo(self.dtype)  # type: ignore[type-var]  # an integer type, as ONNX demands of a zero point
        return int(info.min), int(info.max)

    def integer(self, value: float) -> int:
        """What QuantizeLinear makes of a number: rounded half to even, saturated."""
        scaled = np.rint(np.float32(value) / self.scale) + self.zero_point
        return int(np.clip(scaled, *self.limits))


def run_in_integers(graph: Graph) -> None:
    """Rewrite a graph in reference form, in place."""
    for rewrite in (_clip_after_quantizing, _pool_globally, _move_integers, _quantize_biases):
        rewrite(graph)
        remove_unused(graph)  # a dead reader would hide that a value has only one consumer


def output_step(graph: Graph) -> float | None:
    """The scale of the graph's output, where it is quantized."""
    dequantize = producer(graph.outputs[0], "DequantizeLinear")
    grid = None if dequantize is None else Grid.of(dequantize)
    return None if grid is None else float(grid.scale)


def _clip_after_quantizing(graph: Graph) -> None:
    """Turn operator-activation-Q into operator-Q-integer clip, without the clip where the grid ends there anyway.

    Rounding and saturating are monotone, so Q(clip(x, a, b)) = clip(Q(x), Q(a), Q(b)) for every x. A ReLU in front
    of a grid that starts at zero is no node at all then, and nothing keeps the operator before it from its Q.
    """
    for quantize in nodes(graph, "QuantizeLinear"):
        grid = Grid.of(quantize)
        while grid is not None and (activation := _own_activation(quantize)) is not None:
            bounds = _integer_bounds(activation, grid)
            quantize.replace_input_with(0, activation.inputs[0])
            graph.remove(activation, safe=True)
            if bounds != grid.limits:
                readers = list(quantize.outputs[0].uses())
                clip = _add_clip(first_consumer(quantize.outputs[0]), quantize.outputs[0], bounds, grid)
                for reader, index in readers:
                    reader.replace_input_with(index, clip)


def _own_activation(quantize: Node) -> Node | None:
    activation = producer(quantize.inputs[0], *_CLIPS)
    if activation is None or only_consumer(activation.outputs[0]) is not quantize:
        return None
    return None if producer(activation.inputs[0], "DequantizeLinear") else activation


def _integer_bounds(activation: Node, grid: Grid) -> tuple[int, int]:
    """The integers that an activation's bounds fall on."""
    low, high = 0.0, np.inf
    if activation.op_type == "Clip":
        ends = [constant(value) for value in (*activation.inputs[1:], None, None)[:2]]
        low = -np.inf if ends[0] is None else ends[0].item()
        high = np.inf if ends[1] is None else ends[1].item()
    return grid.integer(low), grid.integer(high)


def _add_clip(before: Node, value: Value, bounds: tuple[int, int], grid: Grid) -> Value:
    low, high = (np.array(bound, grid.dtype) for bound in bounds)
    ends = add_constant(before.graph, f"{value.name}.low", low), add_constant(before.graph, f"{value.name}.high", high)
    clipped: Value = add_node(before, "Clip", [value, *ends]).outputs[0]
    return clipped


def _pool_globally(graph: Graph) -> None:
    """Write the mean over height and width as a GlobalAveragePool, which has an integer kernel."""
    for mean in nodes(graph, "ReduceMean"):
        quantize = only_consumer(mean.outputs[0], "QuantizeLinear")
        is_between = quantize is not None and producer(mean.inputs[0], "DequantizeLinear") is not None
        if quantize is None or not is_between or not _is_over_height_and_width(mean):
            continue
        pool = add_node(mean, "GlobalAveragePool", [mean.inputs[0]])
        quantize.replace_input_with(0, pool.outputs[0])
        if not integers(mean, "keepdims", (1,))[0]:
            readers = list(quantize.outputs[0].uses())
            flatten = add_node(first_consumer(quantize.outputs[0]), "Flatten", [quantize.outputs[0]], axis=1)
            for reader, index in readers:
                reader.replace_input_with(index, flatten.outputs[0])


def _is_over_height_and_width(mean: Node) -> bool:
    axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
    shape = mean.inputs[0].shape
    return axes is not None and shape is not None and len(shape) == 4 and {int(axis) % 4 for axis in axes} == {2, 3}


def _move_integers(graph: Graph) -> None:
    """Let what only moves or clips values do so to integers: DQ-operator-Q on one grid becomes the operator."""
    for node in nodes(graph):
        if node.op_type == "Concat":
            _concatenate_integers(node)
            continue
        dequantize = producer(node.inputs[0], "DequantizeLinear") if node.inputs else None
        grid = None if dequantize is None else Grid.of(dequantize)
        if dequantize is None or grid is None:
            continue
        if node.op_type == "QuantizeLinear":
            _skip_requantizing(dequantize, node)
        elif node.op_type in (*_MOVES, *_CLIPS):
            quantizes = [only_consumer(output, "QuantizeLinear") for output in node.outputs]
            if any(quantize is None or Grid.of(quantize) != grid for quantize in quantizes):
                continue
            node.replace_input_with(0, dequantize.inputs[0])
            results = [_clipped(node, grid)] if node.op_type in _CLIPS else node.outputs
            for quantize, result in zip(quantizes, results, strict=True):
                assert quantize is not None
                replace(quantize.outputs[0], result)


def _clipped(activation: Node, grid: Grid) -> Value:
    bounds = _integer_bounds(activation, grid)
    value = activation.inputs[0]
    return value if bounds == grid.limits else _add_clip(activation, value, bounds, grid)


def _skip_requantizing(dequantize: Node, quantize: Node) -> None:
    """Drop a Q that reads a DQ and nothing in between, whatever its grid.

    torch's reference form has one behind a dropout, whose output it observes anew; its int8 form has none.
    """
    readers = consumers(quantize.outputs[0])
    if Grid.of(quantize) == Grid.of(dequantize):
        replace(quantize.outputs[0], dequantize.inputs[0])
    elif readers and all(reader.op_type == "DequantizeLinear" for reader in readers):
        for reader in readers:
            replace(reader.outputs[0], dequantize.outputs[0])


def _concatenate_integers(concat: Node) -> None:
    quantize = only_consumer(concat.outputs[0], "QuantizeLinear")
    sources = [producer(value, "DequantizeLinear") for value in concat.inputs]
    grids = {None if source is None else Grid.of(source) for source in sources}
    if quantize is None or grids != {Grid.of(quantize)} or None in grids:
        return
    for index, source in enumerate(sources):
        assert source is not None
        concat.replace_input_with(index, source.inputs[0])
    replace(quantize.outputs[0], concat.outputs[0])


def _quantize_biases(graph: Graph) -> None:
    """Store biases as int32 on the grid of the sums they are added to, as integer kernels want them.

    torch's x86 kernels add the float bias to the sum. Rounding it to this grid moves the sum by at most half of
    input scale * weight scale, some thousandths of a step of the output.
    """
    layers = [layer for node in nodes(graph, "Conv", "Gemm") if (layer := _IntegerLayer.of(node)) is not None]
    for layer in layers:
        layer.make_room()
    for layer in layers:
        layer.quantize_bias(graph)


@dataclass(frozen=True)
class _IntegerLayer:
    """A Conv or Gemm between DQ and Q, with a float bias."""

    node: Node
    input_scale: np.float32
    weight: Node
    bias: Array

    @classmethod
    def of(cls, node: Node) -> _IntegerLayer | None:
        source, weight = (producer(value, "DequantizeLinear") for value in node.inputs[:2])
        bias = constant(node.inputs[2]) if len(node.inputs) == 3 else None
        grid = None if source is None else Grid.of(source)
        if grid is None or weight is None or bias is None or constant(weight.inputs[0]) is None:
            return None
        is_fusable = only_consumer(node.outputs[0], "QuantizeLinear") is not None
        return cls(node, grid.scale, weight, bias) if is_fusable and bias.ndim == 1 else None

    @property
    def bias_scales(self) -> Array:
        scales: Array = self.input_scale * _content(self.weight.inputs[1])
        return scales

    def make_room(self) -> None:
        """Coarsen the weights of channels whose bias would not fit int32.

        It takes a bias some 2**30 times the scale of the products to get here: a channel whose weights are all but
        zero. Coarser weights change its sum by less than num_products * 127 / 2**30 of the bias.
        """
        factors = np.ceil(np.abs(self.bias.astype(np.float64)) / self.bias_scales / _INT32_ROOM)
        if factors.max() <= 1:
            return
        integers_, scales = (_content(value) for value in self.weight.inputs[:2])
        factors = np.maximum(factors if scales.ndim else factors.max(), 1)
        per_channel = factors.reshape(-1, *[1] * (integers_.ndim - 1)) if scales.ndim else factors
        _rewrite(self.weight.inputs[0], np.rint(integers_ / per_channel).astype(integers_.dtype))
        _rewrite(self.weight.inputs[1], (scales * factors).astype(np.float32))

    def quantize_bias(self, graph: Graph) -> None:
        name = self.node.inputs[2].name
        scales = self.bias_scales.astype(np.float32)
        rounded = np.rint(self.bias.astype(np.float64) / scales).astype(np.int32)
        parts = add_constant(graph, f"{name}.int32", rounded), add_constant(graph, f"{name}.scale", scales)
        dequantize = add_node(self.node, "DequantizeLinear", parts, axis=0)
        self.node.replace_input_with(2, dequantize.outputs[0])


def _content(value: Value) -> Array:
    content = constant(value)
    assert content is not None
    return content


def _rewrite(value: Value, content: Array) -> None:
    from onnxscript import ir

    value.const_value = ir.tensor(content, name=value.name)
