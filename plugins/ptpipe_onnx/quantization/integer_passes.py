"""Graph passes behind ONNX Runtime's quantizer: the form in which ONNX Runtime finds its quicker kernels.

They are those of `export.onnx`, and two more for what its quantizer writes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ptpipe_onnx.activation_pass import write_fusable_activations
from ptpipe_onnx.graph import (
    add_initializer,
    constant,
    consumers,
    insert_node,
    nodes,
    only_consumer,
    producer,
    remove_unused,
    replace,
    source,
)
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.hardswish_pass import GateGrid
from ptpipe_onnx.latency_passes import use_quicker_kernels
from ptpipe_onnx.qdq_passes import use_integer_kernels
from ptpipe_onnx.runtime_passes import prevent_fusions
from ptpipe_torch.int8.hardswish_grids import BEND, whole_steps


def write_with_quicker_kernels(quantized: Path, path: Path) -> None:
    """Write a quantized file, in QDQ form, as `path`."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load(quantized, load_external_data=False)))
    _add_biases_before_rounding(model.graph)
    _write_integer_hardswish(model.graph)
    use_integer_kernels(model)
    write_fusable_activations(model.graph)
    use_quicker_kernels(model.graph)
    prevent_fusions(model.graph)
    remove_unused(model)
    content = ir.to_proto(model)
    content.graph.ClearField("value_info")  # what moves integers had the type of what it moved before
    onnx.save_model(content, path)


def _add_biases_before_rounding(graph: ir.Graph) -> None:
    """Remove the rounding between a matrix product and the addition of its bias, both of which are rounded behind."""
    for add in nodes(graph, "Add"):
        if only_consumer(add.outputs[0], "QuantizeLinear") is None:
            continue
        for value, bias in zip(add.inputs, reversed(add.inputs), strict=True):
            dequantize = producer(value, "DequantizeLinear")
            quantize = None if dequantize is None else producer(dequantize.inputs[0], "QuantizeLinear")
            if dequantize is None or quantize is None or constant(bias) is None:
                continue
            is_alone = only_consumer(dequantize.outputs[0]) is add and only_consumer(quantize.outputs[0]) is dequantize
            product = producer(quantize.inputs[0], "MatMul")
            if is_alone and product is not None and only_consumer(product.outputs[0]) is quantize:
                replace(dequantize.outputs[0], product.outputs[0])
                graph.remove([dequantize, quantize], safe=True)
                break


def _write_integer_hardswish(graph: ir.Graph) -> None:
    """Write what each HardSwish between DequantizeLinear and QuantizeLinear needs to be a product of integers.

    Where 3 can be a whole number of steps of what it reads alone, that grid, at most 1/16 wider: `hardswish_pass` does
    the rest, and rounds nothing. Else its second factor, rounded: as the quantizer would.
    """
    for hardswish in nodes(graph, "HardSwish"):
        dequantize = producer(hardswish.inputs[0], "DequantizeLinear")
        grid = None if dequantize is None else Grid.of(dequantize)
        if dequantize is None or grid is None or only_consumer(hardswish.outputs[0], "QuantizeLinear") is None:
            continue
        if (wider := _with_whole_steps(grid)) is None or not _give_grid(graph, hardswish, dequantize, wider):
            _multiply_by_rounded_factor(graph, hardswish, grid)


def _with_whole_steps(grid: Grid) -> Grid | None:
    """Return the next wider grid on which 3 is a whole number of steps; None where that is no use."""
    lowest = grid.limits[0]
    low = torch.tensor(min(0.0, (lowest - grid.zero_point) * float(grid.scale)))
    scale, zero_point = whole_steps(torch.tensor(float(grid.scale)), torch.tensor(grid.zero_point), low, lowest)
    wider = Grid(np.float32(scale.item()), int(zero_point.item()), grid.dtype)
    return wider if GateGrid.of(wider) is not None else None


def _give_grid(graph: ir.Graph, hardswish: ir.Node, dequantize: ir.Node, grid: Grid) -> bool:
    """Round what a HardSwish reads on another grid; return False where anything else reads it."""
    quantize = producer(dequantize.inputs[0], "QuantizeLinear")
    readers = [] if quantize is None else consumers(quantize.outputs[0])
    if quantize is None or any(only_consumer(reader.outputs[0]) is not hardswish for reader in readers):
        return False
    scale, zero_point = _stored(graph, f"{source(quantize).name}.grid", grid)
    for node in (quantize, *readers):
        node.replace_input_with(1, scale)
        node.replace_input_with(2, zero_point)
    return True


def _multiply_by_rounded_factor(graph: ir.Graph, hardswish: ir.Node, grid: Grid) -> None:
    """Replace a HardSwish by x times relu6(x + 3) / 6, whose range is that of x + 3: the grid's ends clip it."""
    x, name = source(hardswish), f"{hardswish.outputs[0].name}.factor"
    lowest, highest = grid.limits
    top = BEND + min(BEND, (highest - grid.zero_point) * float(grid.scale))
    sums = Grid(np.float32(top / (highest - lowest)), lowest, grid.dtype)
    one = add_initializer(graph, f"{name}.one", np.array(lowest + 1, grid.dtype))
    bend = Grid(np.float32(BEND), lowest, grid.dtype)
    three = insert_node(hardswish, "DequantizeLinear", [one, *_stored(graph, f"{name}.bend", bend)]).outputs[0]
    total = insert_node(hardswish, "Add", [x, three]).outputs[0]
    integers = insert_node(hardswish, "QuantizeLinear", [total, *_stored(graph, f"{name}.sums", sums)]).outputs[0]
    sixth = Grid(np.float32(sums.scale / (2 * BEND)), lowest, grid.dtype)
    factor = insert_node(hardswish, "DequantizeLinear", [integers, *_stored(graph, name, sixth)]).outputs[0]
    replace(hardswish.outputs[0], insert_node(hardswish, "Mul", [x, factor]).outputs[0])
    graph.remove(hardswish, safe=True)


def _stored(graph: ir.Graph, name: str, grid: Grid) -> tuple[ir.Value, ir.Value]:
    """Store scale and zero point of a grid."""
    zero_point = np.array(grid.zero_point, grid.dtype)
    return (
        add_initializer(graph, f"{name}.scale", np.array(grid.scale)),
        add_initializer(graph, f"{name}.zero_point", zero_point),
    )
