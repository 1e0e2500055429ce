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
    nodes,
    only_consumer,
    producer,
    remove_unused,
    replace,
    source,
)
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.latency_passes import use_quicker_kernels
from ptpipe_onnx.qdq_passes import use_integer_kernels
from ptpipe_onnx.runtime_passes import prevent_fusions
from ptpipe_torch.int8.hardswish_grids import whole_steps


def write_with_quicker_kernels(quantized: Path, path: Path) -> None:
    """Write a quantized file, in QDQ form, as `path`."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load(quantized, load_external_data=False)))
    _add_biases_before_rounding(model.graph)
    _use_whole_steps(model.graph)
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


def _use_whole_steps(graph: ir.Graph) -> None:
    """Give what each HardSwish reads a grid on which 3 is a whole number of steps, where nothing else reads it.

    At most 1/16 wider; then HardSwish is a product of integers: see `hardswish_pass`.
    """
    for hardswish in nodes(graph, "HardSwish"):
        dequantize = producer(hardswish.inputs[0], "DequantizeLinear")
        quantize = None if dequantize is None else producer(dequantize.inputs[0], "QuantizeLinear")
        grid = None if quantize is None else Grid.of(quantize)
        if quantize is None or grid is None or only_consumer(hardswish.outputs[0], "QuantizeLinear") is None:
            continue
        readers = consumers(quantize.outputs[0])
        if any(only_consumer(reader.outputs[0]) is not hardswish for reader in readers):
            continue
        lowest = grid.limits[0]
        low = torch.tensor(min(0.0, (lowest - grid.zero_point) * float(grid.scale)))
        found = whole_steps(torch.tensor(float(grid.scale)), torch.tensor(grid.zero_point), low, lowest)
        name = source(quantize).name
        scale, zero_point = (
            add_initializer(graph, f"{name}.{part}", np.array(number, dtype))
            for part, number, dtype in (
                ("scale", found[0].item(), np.float32), ("zero_point", found[1].item(), grid.dtype),
            )
        )  # fmt: skip
        for node in (quantize, *readers):
            node.replace_input_with(1, scale)
            node.replace_input_with(2, zero_point)
