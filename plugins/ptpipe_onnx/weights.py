"""Graph passes that store the quantized weights of a torch model as int8 in an exported graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common

from ptpipe import StageError
from ptpipe_onnx.graph import (
    add_initializer,
    constant,
    consumers,
    dropped_arrays_released,
    first_consumer,
    insert_node,
    int_attribute,
    nodes,
    remove_unused,
    replace,
)
from ptpipe_torch.int8.layers import QuantizedWeight


def store_weights(model: ir.Model, weights: Mapping[str, QuantizedWeight]) -> None:
    """Replace each named float initializer by an int8 one and a DequantizeLinear, in place.

    Equal ones share an initializer: the calls of one layer have weights of their own in the reference network.

    Raises StageError for a weight that the exported graph does not have under its name.
    """
    graph = model.graph
    for name, weight in weights.items():
        value = take_weight(graph, name)
        for reader in consumers(value):
            if reader.op_type == "Transpose" and int_attribute(reader, "perm", (1, 0)) == (1, 0):
                replace(reader.outputs[0], _dequantize(graph, reader, f"{name}.transposed", weight.transposed()))
                graph.remove(reader, safe=True)
        if consumers(value):
            replace(value, _dequantize(graph, first_consumer(value), name, weight))
    remove_unused(model)
    _make_contiguous(model.graph)  # the pass hashes their memory
    with dropped_arrays_released(model):
        common.DeduplicateHashedInitializersPass()(model)


def _make_contiguous(graph: ir.Graph) -> None:
    """Replace, in place, arrays that are views into others: buffers that a network keeps transposed, folded slices."""
    for value in graph.initializers.values():
        array = constant(value)
        if array is not None and not array.flags.c_contiguous:
            value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)


def store_float_weights(model: ir.Model, weights: Mapping[str, QuantizedWeight]) -> None:
    """Store the rounded weights of layers that compute in float as int8, in place.

    Not with DequantizeLinear, which ONNX Runtime does not fold into a float operator and would run every time (1.8
    times the latency of small_cnn): it folds Cast and Mul of constants when it loads the file.
    """
    _store_rows(model.graph, _store_convolutions(model.graph, weights))
    remove_unused(model)


def _store_convolutions(graph: ir.Graph, weights: Mapping[str, QuantizedWeight]) -> dict[str, QuantizedWeight]:
    """Store the weights of convolutions, and return the other ones. Batch norms are folded in already.

    They scale each channel, so each weight is found as the one whose integers are proportional to the floats, per
    channel.
    """
    remaining = dict(weights)
    for node in nodes(graph, "Conv", "ConvTranspose"):
        floats = constant(node.inputs[1])
        if floats is None:
            continue
        for name, weight in remaining.items():
            scales = _scales(floats, weight, axis=0 if node.op_type == "Conv" else 1)
            if scales is not None:
                node.replace_input_with(1, _insert_floats(graph, node, name, weight.integers, scales))
                del remaining[name]
                break
    return remaining


def _store_rows(graph: ir.Graph, weights: Mapping[str, QuantizedWeight]) -> None:
    """Store tables and the weights of recurrent layers, whose rows the exporter may have put into another order."""
    rows = {}
    for weight in weights.values():
        if not weight.per_channel or weight.axis:
            continue
        for floats, integers, scale in zip(weight.dequantized(), weight.integers, weight.scales, strict=True):
            rows[floats.tobytes()] = integers, scale
    for value in list(graph.initializers.values()) if rows else ():
        array = constant(value)
        if array is None or array.ndim < 2 or array.dtype != np.float32 or not consumers(value):
            continue
        found = [rows.get(row.tobytes()) for row in array.reshape(-1, array.shape[-1])]
        known = [row for row in found if row is not None]
        if len(known) == len(found) > 0:
            integers, scales = (np.stack([row[part] for row in known]) for part in range(2))
            shape = (*array.shape[:-1], 1)
            name, before = str(value.name), first_consumer(value)
            replace(value, _insert_floats(graph, before, name, integers.reshape(array.shape), scales.reshape(shape)))


def _insert_floats(
    graph: ir.Graph, before: ir.Node, name: str, integers: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]
) -> ir.Value:
    int8 = add_initializer(graph, f"{name}.int8", integers)
    scale = add_initializer(graph, f"{name}.scale", scales)
    as_float = insert_node(before, "Cast", [int8], to=ir.DataType.FLOAT).outputs[0]
    return insert_node(before, "Mul", [as_float, scale]).outputs[0]


def _scales(floats: npt.NDArray[np.float32], weight: QuantizedWeight, axis: int = 0) -> npt.NDArray[np.float32] | None:
    """Return the factor of each output channel from integers to these floats; None if they are not proportional.

    `axis`: of the output channels.
    """
    if floats.shape != weight.integers.shape or weight.zero_points.any():
        return None
    num_channels = floats.shape[axis]
    scales_O = np.empty(num_channels, np.float32)
    integers_OX, floats_OX = (np.moveaxis(array, axis, 0) for array in (weight.integers, floats))
    # One by one: in float64, all together would take several times the memory of the weights.
    for channel, (integers, values) in enumerate(zip(integers_OX, floats_OX, strict=True)):
        integers_X, floats_X = integers.astype(np.float64).reshape(-1), values.reshape(-1)
        square = float(integers_X @ integers_X)
        scale = float(integers_X @ floats_X) / square if square else 0.0
        if not np.allclose(integers_X * scale, floats_X, rtol=1e-5, atol=1e-7):
            return None
        scales_O[channel] = scale
    return scales_O.reshape([num_channels if index == axis else 1 for index in range(floats.ndim)])


def take_weight(graph: ir.Graph, name: str) -> ir.Value:
    """Return the initializer of this name and rename it, so that its replacement can take the name.

    Raises StageError if there is none.
    """
    value = graph.initializers.pop(name, None)
    if value is None:
        raise StageError(f"the exported graph has no weight {name}: leave its layer float")
    value.name = f"{name}.float"
    graph.initializers[value.name] = value
    return value


def _dequantize(graph: ir.Graph, before: ir.Node, name: str, weight: QuantizedWeight) -> ir.Value:
    inputs = (
        add_initializer(graph, name, weight.integers),
        add_initializer(graph, f"{name}.scale", weight.scales),
        add_initializer(graph, f"{name}.zero_point", weight.zero_points),
    )
    return insert_node(before, "DequantizeLinear", inputs, axis=weight.axis).outputs[0]
