"""Graph passes that write nearest upsampling of integers as copies of pixels and of rows, for ONNX Runtime (1.32).

Its kernel computes where each byte comes from: 24 channels of 60 x 80 pixels, twice as large, take 311 us. Integer
convolutions have channels last, where the bytes of a pixel and of a row are in one piece, and copying takes 50 us. The
transpositions vanish there. Decision 0043 has the figures of networks.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import (
    add_initializer,
    constant,
    consumers,
    first_consumer,
    insert_node,
    insert_reshape,
    int_attribute,
    known_shape,
    nodes,
    only_consumer,
    producer,
    replace,
    source,
    take_name,
)
from ptpipe_onnx.grid import Grid

_COPYING: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
_TO_CHANNELS_LAST, _TO_CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def copy_pixels(graph: ir.Graph) -> None:
    """Write each Resize between a DequantizeLinear and a QuantizeLinear of one grid as copies, in place.

    Where it is nearest, by whole factors. The values are the same.
    """
    for resize in nodes(graph, "Resize"):
        dequantize = producer(resize.inputs[0], "DequantizeLinear")
        quantize = only_consumer(resize.outputs[0], "QuantizeLinear")
        factors = _factors(resize)
        if dequantize is None or quantize is None or factors is None:
            continue
        integers, before = source(dequantize), quantize.outputs[0]
        shape = known_shape(integers) or known_shape(dequantize.outputs[0]) or ()
        sizes = [size for size in shape[1:] if isinstance(size, int)]
        grid = Grid.of(quantize)
        if grid is None or Grid.of(dequantize) != grid or len(sizes) != 3 or before.is_graph_output():
            continue
        copied = _copied(resize, integers, sizes, factors)
        copied.shape, copied.type = before.shape, before.type
        before.replace_all_uses_with(copied)
        take_name(copied, before)
        graph.remove([quantize, resize], safe=True)


def use_resizing(graph: ir.Graph) -> bool:
    """Undo `copy_pixels`, in place; return whether there was anything. For runtimes that it slows down."""
    written = [(node, found) for node in nodes(graph, "Transpose") if (found := _upsampled(node)) is not None]
    for transpose, (integers, factors) in written:
        copied = transpose.outputs[0]
        first = first_consumer(copied)
        grid = first.inputs[1:]
        scales = add_initializer(graph, f"{copied.name}.scales", np.array((1, 1, *factors), np.float32))
        floats = insert_node(first, "DequantizeLinear", [integers, *grid]).outputs[0]
        larger = insert_node(first, "Resize", [floats, None, scales], **_COPYING).outputs[0]
        replace(copied, insert_node(first, "QuantizeLinear", [larger, *grid]).outputs[0])
    return bool(written)


def _upsampled(transpose: ir.Node) -> tuple[ir.Value, tuple[int, int]] | None:
    """Return the integers of which a Transpose returns copies, and by how much height and width grow."""
    chain, readers = [transpose], consumers(transpose.outputs[0])
    for op_type in ("Reshape", "Concat", "Reshape", "Concat", "Reshape", "Transpose"):
        if (node := producer(chain[-1].inputs[0], op_type)) is None:
            return None
        chain.append(node)
    perms = [int_attribute(node, "perm", ()) for node in (chain[-1], transpose)]
    rows, pixels = chain[2], chain[4]
    are_copies = all(len(set(node.inputs)) == 1 for node in (rows, pixels))
    is_read = bool(readers) and all(reader.op_type == "DequantizeLinear" for reader in readers)
    if perms != [_TO_CHANNELS_LAST, _TO_CHANNELS_FIRST] or not are_copies or not is_read:
        return None
    return source(chain[-1]), (len(rows.inputs), len(pixels.inputs))


def _factors(resize: ir.Node) -> tuple[int, int] | None:
    """Return by how much height and width grow; None if not by copies."""
    found = {name: resize.attributes[name].value for name in _COPYING if name in resize.attributes}
    scales = _scales(resize)
    if found != _COPYING or len(scales) != 4 or any(scale % 1 for scale in scales):
        return None
    samples, channels, height, width = map(int, scales)
    return (height, width) if (samples, channels) == (1, 1) and height * width > 1 else None


def _scales(resize: ir.Node) -> list[float]:
    """Return by how much each axis grows, also where sizes are given; nothing if one is not known."""
    given = constant(resize.inputs[2]) if len(resize.inputs) > 2 else None
    if given is not None and given.size:
        return [float(scale) for scale in given]
    before, after = (known_shape(value) or () for value in (source(resize), resize.outputs[0]))
    scales = list[float]()
    for size, larger in zip(before, after, strict=False):
        if isinstance(size, int) and isinstance(larger, int):
            scales.append(larger / size)
        elif size == larger is not None:
            scales.append(1)
        else:
            return []
    return scales


def _copied(before: ir.Node, integers: ir.Value, sizes_CHW: list[int], factors: tuple[int, int]) -> ir.Value:
    channels, height, width = sizes_CHW

    def repeated(value: ir.Value, number: int) -> ir.Value:
        return insert_node(before, "Concat", [value] * number, axis=2).outputs[0]

    value = insert_node(before, "Transpose", [integers], perm=_TO_CHANNELS_LAST).outputs[0]
    pixels = repeated(insert_reshape(before, value, (0, height * width, 1, channels)), factors[1])
    rows = repeated(insert_reshape(before, pixels, (0, height, 1, width * factors[1] * channels)), factors[0])
    value = insert_reshape(before, rows, (0, height * factors[0], width * factors[1], channels))
    return insert_node(before, "Transpose", [value], perm=_TO_CHANNELS_FIRST).outputs[0]
