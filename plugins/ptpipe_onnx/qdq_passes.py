"""Graph passes that bring a QDQ graph into the form that runtimes fuse into integer kernels.

The input is torch's reference form: every operator computes in float between a DequantizeLinear (DQ) and a
QuantizeLinear (Q). A runtime fuses DQ-operator-Q into an integer kernel only if there is nothing else in between.
Every pass leaves the computed values unchanged, but for the rounding of biases (`_quantize_biases`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import (
    Array,
    add_initializer,
    constant,
    consumers,
    insert_behind,
    insert_node,
    int_attribute,
    nodes,
    only_consumer,
    producer,
    remove_unused,
    replace,
    source,
    take_name,
)
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.linear_pass import use_convolutions
from ptpipe_onnx.subpixel import evaluated, write_as_convolutions
from ptpipe_torch.int8.biases import coarsening, integer_biases, sum_scales

_MOVES = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Split", "Slice", "Gather")
"""Operators whose output elements are input elements: they can work on integers as on floats."""
_CLIPS = ("Relu", "Clip")


def use_integer_kernels(model: ir.Model) -> None:
    """Apply all passes to a model in reference form, in place."""
    for apply in (
        _read_shapes_of_integers,
        _clip_after_quantizing,
        _use_global_pooling,
        _skip_requantizing,
        _quantize_tables,
        _move_integers,
        use_convolutions,
        write_as_convolutions,
        _quantize_biases,
    ):
        apply(model.graph)
        remove_unused(model)  # an unused reader would hide that a value has only one consumer


def output_steps(graph: ir.Graph) -> dict[str, float]:
    """Return the scale of each of the graph's outputs that is quantized, by its name."""
    grids = {
        str(output.name): Grid.of(dequantize)
        for output in graph.outputs
        if (dequantize := producer(output, "DequantizeLinear")) is not None
    }
    return {name: float(grid.scale) for name, grid in grids.items() if grid is not None}


def _read_shapes_of_integers(graph: ir.Graph) -> None:
    """Let each Shape of a layer's float output read the integers: a further reader of the floats keeps the layer float.

    torch.export reads a size from the first tensor that has it, which is in front of the quantize node.
    """
    for shape in nodes(graph, "Shape"):
        value = source(shape)
        while (activation := next(iter(_readers(value, *_CLIPS)), None)) is not None:
            value = activation.outputs[0]
        for quantize in _readers(value, "QuantizeLinear")[:1]:
            shape.replace_input_with(0, quantize.outputs[0])
    graph.sort()  # a quantize node may be behind what reads the size


def _readers(value: ir.Value, *op_types: str) -> list[ir.Node]:
    return [node for node in consumers(value) if node.op_type in op_types]


def _clip_after_quantizing(graph: ir.Graph) -> None:
    """Rewrite operator-activation-Q as operator-Q-clip of integers, without the clip if the grid has its bounds.

    Rounding and saturating are monotone, so Q(clip(x, a, b)) = clip(Q(x), Q(a), Q(b)) for every x. A ReLU in front
    of a grid that starts at zero disappears, and the operator before it can fuse with its Q.
    """
    for quantize in nodes(graph, "QuantizeLinear"):
        grid = Grid.of(quantize)
        while grid is not None and (activation := _exclusive_activation(quantize)) is not None:
            bounds = _integer_bounds(activation, grid)
            quantize.replace_input_with(0, activation.inputs[0])
            graph.remove(activation, safe=True)
            if bounds != grid.limits:
                integers = quantize.outputs[0]
                insert_behind(integers, "Clip", *_limits(graph, integers, bounds, grid))


def _exclusive_activation(quantize: ir.Node) -> ir.Node | None:
    activation = producer(quantize.inputs[0], *_CLIPS)
    if activation is None or only_consumer(activation.outputs[0]) is not quantize:
        return None
    return None if producer(activation.inputs[0], "DequantizeLinear") else activation


def _integer_bounds(activation: ir.Node, grid: Grid) -> tuple[int, int]:
    """Return the integers of an activation's bounds."""
    minimum, maximum = 0.0, np.inf
    if activation.op_type == "Clip":
        bounds = [constant(value) for value in (*activation.inputs[1:], None, None)[:2]]
        minimum = -np.inf if bounds[0] is None else bounds[0].item()
        maximum = np.inf if bounds[1] is None else bounds[1].item()
    return grid.integer(minimum), grid.integer(maximum)


def _limits(graph: ir.Graph, value: ir.Value, bounds: tuple[int, int], grid: Grid) -> list[ir.Value]:
    return [
        add_initializer(graph, f"{value.name}.{name}", np.array(bound, grid.dtype))
        for name, bound in zip(("min", "max"), bounds, strict=True)
    ]


def _use_global_pooling(graph: ir.Graph) -> None:
    """Rewrite the mean over height and width as GlobalAveragePool, which has an integer kernel."""
    for mean in nodes(graph, "ReduceMean"):
        quantize = only_consumer(mean.outputs[0], "QuantizeLinear")
        is_between = quantize is not None and producer(mean.inputs[0], "DequantizeLinear") is not None
        if quantize is None or not is_between or not _is_over_height_and_width(mean):
            continue
        pool = insert_node(mean, "GlobalAveragePool", [mean.inputs[0]])
        quantize.replace_input_with(0, pool.outputs[0])
        if not int_attribute(mean, "keepdims", (1,))[0]:
            insert_behind(quantize.outputs[0], "Flatten", axis=1)


def _is_over_height_and_width(mean: ir.Node) -> bool:
    axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
    shape = source(mean).shape
    return axes is not None and shape is not None and len(shape) == 4 and {int(axis) % 4 for axis in axes} == {2, 3}


def _skip_requantizing(graph: ir.Graph) -> None:
    """Remove each Q that reads a DQ directly, whatever its grid.

    torch's reference form has one behind dropout, whose output is observed again; its int8 form has none.
    """
    for quantize in nodes(graph, "QuantizeLinear"):
        dequantize = producer(quantize.inputs[0], "DequantizeLinear")
        grid = None if dequantize is None else Grid.of(dequantize)
        if dequantize is None or grid is None:
            continue
        readers = consumers(quantize.outputs[0])
        if Grid.of(quantize) == grid:
            replace(quantize.outputs[0], source(dequantize))
        elif readers and all(reader.op_type == "DequantizeLinear" for reader in readers):
            for reader in readers:
                replace(reader.outputs[0], dequantize.outputs[0])


def _quantize_tables(graph: ir.Graph) -> None:
    """Store the integers that rows of a table are rounded to, in place of the table, and look these up.

    A byte for each value, in the memory of a runtime, too: it would compute the floats when it loads the file.
    """
    for lookup in nodes(graph, "Gather"):
        quantize = only_consumer(lookup.outputs[0], "QuantizeLinear")
        table, grid = source(lookup), None if quantize is None else Grid.of(quantize)
        content = constant(table)
        if quantize is None or grid is None or content is None or content.dtype != np.float32 or len(table.uses()) > 1:
            continue
        lookup.replace_input_with(0, add_initializer(graph, f"{table.name}.integers", grid.integers(content)))
        rows, rounded = lookup.outputs[0], quantize.outputs[0]
        replace(rounded, rows)
        take_name(rows, rounded)
        rows.type = rounded.type


def _move_integers(graph: ir.Graph) -> None:
    """Let operators that move values, and those that clip them on one grid, work on integers, in place.

    A DQ in front of such an operator goes behind it, and disappears with a Q on its grid.
    """
    for node in nodes(graph):
        if node.op_type == "Concat":
            _concatenate_integers(node)
        elif (dequantize := _movable(node)) is not None:
            _move_behind(graph, dequantize, node)


def _movable(node: ir.Node) -> ir.Node | None:
    """Return the DQ of an activation in front of an operator, if it may go behind the operator."""
    dequantize = producer(node.inputs[0], "DequantizeLinear") if node.inputs else None
    grid = None if dequantize is None else Grid.of(dequantize)
    if dequantize is None or grid is None or constant(dequantize.inputs[0]) is not None:
        return None
    if node.op_type in _CLIPS:
        quantize = only_consumer(node.outputs[0], "QuantizeLinear")
        return dequantize if quantize is not None and Grid.of(quantize) == grid else None
    is_output = any(output.is_graph_output() for output in node.outputs)
    returns_indices = node.op_type == "MaxPool" and len(node.outputs) > 1  # which have no grid
    return dequantize if node.op_type in _MOVES and not is_output and not returns_indices else None


def _move_behind(graph: ir.Graph, dequantize: ir.Node, node: ir.Node) -> None:
    grid = Grid.of(dequantize)
    assert grid is not None
    quantizes = [only_consumer(output, "QuantizeLinear") for output in node.outputs]
    node.replace_input_with(0, dequantize.inputs[0])
    results = [_clip_integers(graph, node, grid)] if node.op_type in _CLIPS else node.outputs
    for quantize, result in zip(quantizes, results, strict=True):
        if quantize is None or Grid.of(quantize) != grid:
            _dequantize_behind(result, dequantize)
            continue
        replace(quantize.outputs[0], result)
        if result is not source(node):  # the integers of a clip without effect have their name already
            take_name(result, quantize.outputs[0])


def _dequantize_behind(moved: ir.Value, dequantize: ir.Node) -> None:
    if consumers(moved):
        floats = insert_behind(moved, "DequantizeLinear", source(dequantize, 1), source(dequantize, 2))
        floats.type, floats.shape = moved.type, moved.shape
        moved.name = f"{source(dequantize).name}.{floats.name}"


def _clip_integers(graph: ir.Graph, activation: ir.Node, grid: Grid) -> ir.Value:
    bounds = _integer_bounds(activation, grid)
    value = source(activation)
    if bounds == grid.limits:
        return value
    return insert_node(activation, "Clip", [value, *_limits(graph, value, bounds, grid)]).outputs[0]


def _concatenate_integers(concat: ir.Node) -> None:
    """Rewrite DQ-Concat-Q on one grid as Concat of integers.

    If inputs were rounded to this grid just for it, it reads what they were before, and rounds itself: runtimes fuse
    this into one integer kernel, which copies the other inputs.
    """
    quantize = only_consumer(concat.outputs[0], "QuantizeLinear")
    dequantizes = [node for value in concat.inputs if (node := producer(value, "DequantizeLinear")) is not None]
    grids = {Grid.of(dequantize) for dequantize in dequantizes}
    if quantize is None or len(dequantizes) < len(concat.inputs) or grids != {Grid.of(quantize)} or None in grids:
        return
    rounded = {index: value for index, node in enumerate(dequantizes) if (value := _before_rounding(node)) is not None}
    for index, dequantize in enumerate(dequantizes):
        value = rounded.get(index, dequantize.outputs[0]) if rounded else dequantize.inputs[0]
        concat.replace_input_with(index, value)
    if not rounded:
        replace(quantize.outputs[0], concat.outputs[0])
        take_name(concat.outputs[0], quantize.outputs[0])


def _before_rounding(dequantize: ir.Node) -> ir.Value | None:
    """Return what a DQ-Q-DQ chain, whose last two nothing else reads, starts with; None for any other DQ."""
    quantize = producer(dequantize.inputs[0], "QuantizeLinear")
    before = None if quantize is None else producer(quantize.inputs[0], "DequantizeLinear")
    if quantize is None or before is None or Grid.of(before) is None:
        return None
    return before.outputs[0] if only_consumer(quantize.outputs[0]) is dequantize else None


def _quantize_biases(graph: ir.Graph) -> None:
    """Store biases as int32 on the grid of the sums they are added to, as integer kernels require.

    Those of `quant.convert` lie on it. Rounding another one changes the sum by at most half of input scale * weight
    scale, some thousandths of a step of the output.
    """
    layers = [layer for node in nodes(graph, "Conv", "Gemm") if (layer := _IntegerLayer.of(node)) is not None]
    for layer in layers:
        layer.coarsened(graph).quantize_bias(graph)


@dataclass(frozen=True)
class _IntegerLayer:
    """A Conv or Gemm between DQ and Q, with a float bias."""

    node: ir.Node
    input_scale: np.float32
    weight: ir.Node
    """The DequantizeLinear of the weight."""
    bias: Array

    @classmethod
    def of(cls, node: ir.Node) -> _IntegerLayer | None:
        data, weight = (producer(value, "DequantizeLinear") for value in node.inputs[:2])
        bias = constant(node.inputs[2]) if len(node.inputs) == 3 else None
        grid = None if data is None else Grid.of(data)
        if grid is None or weight is None or bias is None or evaluated(weight.inputs[0]) is None:
            return None
        is_fusable = only_consumer(node.outputs[0], "QuantizeLinear") is not None
        return cls(node, grid.scale, weight, bias) if is_fusable and bias.ndim == 1 else None

    @property
    def bias_scales(self) -> Array:
        return sum_scales(self.input_scale, _content(self.weight.inputs[1]))

    def coarsened(self, graph: ir.Graph) -> _IntegerLayer:
        """Return the layer with larger weight scales for channels whose bias would not fit int32.

        They are this layer's own: another one may read the same weights, with another bias.
        """
        factors = coarsening(self.bias, self.bias_scales)
        if factors.max() <= 1:
            return self
        integers, scales = evaluated(self.weight.inputs[0]), _content(self.weight.inputs[1])
        assert integers is not None
        axis = int_attribute(self.weight, "axis", (1,))[0]
        shape = [-1 if scales.ndim and index == axis % integers.ndim else 1 for index in range(integers.ndim)]
        coarse = (
            np.rint(integers / factors.reshape(shape)).astype(integers.dtype),
            scales * factors,
        )
        names = [source(self.weight, index).name for index in range(2)]
        inputs = [add_initializer(graph, str(name), content) for name, content in zip(names, coarse, strict=True)]
        weight = insert_node(self.node, "DequantizeLinear", [*inputs, self.weight.inputs[2]], axis=axis)
        self.node.replace_input_with(1, weight.outputs[0])
        return _IntegerLayer(self.node, self.input_scale, weight, self.bias)

    def quantize_bias(self, graph: ir.Graph) -> None:
        """Replace the float bias by an int32 initializer and a DequantizeLinear."""
        name = source(self.node, 2).name
        scales = self.bias_scales
        rounded = integer_biases(self.bias, scales)
        inputs = add_initializer(graph, f"{name}.int32", rounded), add_initializer(graph, f"{name}.scale", scales)
        dequantize = insert_node(self.node, "DequantizeLinear", inputs, axis=0)
        self.node.replace_input_with(2, dequantize.outputs[0])


def _content(value: ir.Value | None) -> Array:
    content = constant(value)
    assert content is not None
    return content
