"""Graph passes that let ONNX Runtime (1.32) take quicker kernels for the same values.

Figures: one thread, AMD EPYC, AVX-512 VNNI and, in parentheses, AVX2 alone. How they were measured: decision 0043.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.added_channels import pad_channels, pad_depthwise
from ptpipe_onnx.barriers import insert_barrier
from ptpipe_onnx.graph import (
    add_initializer,
    constant,
    consumers,
    first_consumer,
    insert_behind,
    insert_copy,
    insert_node,
    insert_reshape,
    int_attribute,
    known_shape,
    nodes,
    only_consumer,
    other_input,
    producer,
    replace,
    separate,
    source,
    take_name,
)
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.hardswish_pass import use_integer_hardswish
from ptpipe_onnx.repeated_channels import repeat_channels
from ptpipe_onnx.upsampling import copy_pixels
from ptpipe_onnx.volumes import write_volumes_as_images

_SHORT_RUN = 16
_INTEGER_KERNELS = (
    "Add", "AveragePool", "Concat", "Conv", "ConvTranspose", "Gemm", "GlobalAveragePool", "LeakyRelu", "MatMul", "Mul",
    "Sigmoid", "Softmax", "Where",
)  # fmt: skip


def use_quicker_kernels(graph: ir.Graph) -> None:
    """Apply all passes to a graph in the form of `qdq_passes`, in place."""
    _keep_float_softmax(graph)
    _keep_short_broadcasts_float(graph)
    _average_in_float(graph)
    _add_halves(graph)
    use_integer_hardswish(graph)
    _pool_before_clipping(graph)
    _pool_before_rounding(graph)
    _pool_volumes_in_float(graph)
    write_volumes_as_images(graph)
    pad_channels(graph)
    repeat_channels(graph)
    pad_depthwise(graph)
    _write_out_prelu(graph)
    _divide_by_roots(graph)
    merge_axes_behind_softmax(graph)
    copy_pixels(graph)


def _keep_float_softmax(graph: ir.Graph) -> None:
    """Keep each softmax between DequantizeLinear and QuantizeLinear in float.

    ONNX Runtime's integer kernel of the three looks up one exponential after another; its float one computes 16 at
    once. ViT-B/16 takes 0.86x (0.95x) the time.
    """
    for softmax in nodes(graph, "Softmax"):
        is_read_as_integers = only_consumer(softmax.outputs[0], "QuantizeLinear") is not None
        dequantize = producer(softmax.inputs[0], "DequantizeLinear")
        if is_read_as_integers and dequantize is not None:
            softmax.replace_input_with(0, insert_barrier(dequantize, softmax))


def merge_axes_behind_softmax(graph: ir.Graph) -> None:
    """Compute a softmax over an axis that several are behind, as of classes of pixels, with one axis in their place.

    ONNX Runtime swaps the axis with the last one, which is slow unless it is next to it. The values are equal: 16 x 4 x
    336 of a detector's boxes take 23 us in place of 133; 21 classes of 128 x 128 pixels 0.47 ms in place of 2.6.
    (AVX2: not measured.)
    """
    for softmax in nodes(graph, "Softmax", "LogSoftmax"):
        x, before = source(softmax), softmax.outputs[0]
        shape, (axis,) = known_shape(x) or (), int_attribute(softmax, "axis", (-1,))
        axis %= max(1, len(shape))
        sizes = [size if isinstance(size, int) else -1 for size in shape[axis + 1 :]]
        if len(sizes) < 2 or sizes.count(-1) > 1:
            continue
        kept = [0] * (axis + 1)
        flat = insert_reshape(softmax, x, [*kept, -1])
        normalized = insert_node(softmax, softmax.op_type, [flat], axis=axis).outputs[0]
        replace(before, insert_reshape(softmax, normalized, [*kept, *sizes]))
        graph.remove(softmax, safe=True)


def _keep_short_broadcasts_float(graph: ir.Graph) -> None:
    """Keep products and sums in float that repeat one input every few elements, as weights of experts or heads are.

    ONNX Runtime's integer kernels are called for each run of elements: 8,192 runs of 4 take 2.5 times as long as in
    float, with the conversions; from 32 elements on the integer kernels are quicker. (AVX2: not measured.)
    """
    for node in nodes(graph, "Mul", "Add"):
        is_rounded = only_consumer(node.outputs[0], "QuantizeLinear") is not None
        if not is_rounded or not all(producer(value, "DequantizeLinear") for value in node.inputs):
            continue
        first, second = (known_shape(source(node, index)) for index in range(2))
        if first is not None and second is not None and _run_length(first, second) < _SHORT_RUN:
            separate(node)


def _average_in_float(graph: ir.Graph) -> None:
    """Compute average pooling over windows in float.

    ONNX Runtime's integer kernel is not vectorized: 64 x 56 x 56 values under windows of 3 x 3, between two pointwise
    convolutions, take 1,024 us with them, in float 235; 32 x 32 x 32 under 5 along one of three axes 276 and 24.
    """
    for pool in nodes(graph, "AveragePool"):
        is_rounded = only_consumer(pool.outputs[0], "QuantizeLinear") is not None
        if is_rounded and producer(pool.inputs[0], "DequantizeLinear"):
            separate(pool)


def _add_halves(graph: ir.Graph) -> None:
    """Sum an axis of two integers as the sum of two tensors, which has an integer kernel.

    Sums along another axis than the last one are slow: 2 x 64 x 56 x 56 values take 0.27 ms in float, and the branches
    of SKNet and ResNeSt are such. Split and QLinearAdd take 0.05 ms. (AVX2: not measured.)
    """
    for total in nodes(graph, "ReduceSum"):
        dequantize = producer(total.inputs[0], "DequantizeLinear")
        axes = constant(total.inputs[1]) if len(total.inputs) > 1 else None
        is_rounded = only_consumer(total.outputs[0], "QuantizeLinear") is not None
        shape = known_shape(source(total)) or ()
        if dequantize is None or not is_rounded or axes is None or [shape[axis] for axis in axes if shape] != [2]:
            continue
        sizes = add_initializer(graph, "sizes", np.array([1, 1]))
        integers = source(dequantize)
        halves = insert_node(total, "Split", [integers, sizes], 2, axis=int(axes.item())).outputs
        if int_attribute(total, "keepdims", (1,)) == (0,):
            halves = [insert_node(total, "Squeeze", [half, source(total, 1)]).outputs[0] for half in halves]
        for index, half in enumerate(halves):
            half.name = f"{integers.name}.{total.outputs[0].name}_{index}"
        floats = [insert_node(total, "DequantizeLinear", [half, *dequantize.inputs[1:]]).outputs[0] for half in halves]
        replace(total.outputs[0], insert_node(total, "Add", floats).outputs[0])
        graph.remove(total, safe=True)


def _run_length(first: Sequence[int | str | None], second: Sequence[int | str | None]) -> float:
    """Return how many elements two operands have in a row before one of them is repeated; infinity if none is."""
    length, kinds = 1, set[str]()
    for one, two in zip_longest(reversed(first), reversed(second), fillvalue=1):
        if (one, two) == (1, 1):
            continue
        kinds.add("both" if one == two else "first" if two == 1 else "second")
        if len(kinds) > 1:
            return length
        size = two if one == 1 else one
        length *= size if isinstance(size, int) else _SHORT_RUN
    return math.inf


def _pool_before_clipping(graph: ir.Graph) -> None:
    """Rewrite Clip-MaxPool of integers as MaxPool-Clip: both are monotone, and their order makes no difference.

    Max pooling right behind a convolution runs with channels last. DenseNet-121 takes 0.78x (0.90x) the time.
    """
    for pool in nodes(graph, "MaxPool"):
        clip = producer(pool.inputs[0], "Clip")
        if clip is None or producer(clip.inputs[0], "QuantizeLinear") is None or pool.outputs[0].is_graph_output():
            continue
        if len(pool.outputs) == 1 and only_consumer(clip.outputs[0]) is pool:
            bounds = [source(clip, index) for index in (1, 2)]
            pool.replace_input_with(0, clip.inputs[0])
            graph.remove(clip, safe=True)
            insert_behind(pool.outputs[0], "Clip", *bounds)


def _pool_before_rounding(graph: ir.Graph) -> None:
    """Rewrite Q-MaxPool of what a float operator computes as MaxPool-Q: rounding is monotone, and fewer are rounded.

    ONNX Runtime's kernel for integers is quick with channels last alone, as integer convolutions compute: behind a
    response normalization, 32 x 32 x 32 values take 15 us in place of 103. Without a copy it would move Q back.
    """
    for pool in nodes(graph, "MaxPool"):
        quantize = producer(pool.inputs[0], "QuantizeLinear")
        if quantize is None or len(pool.outputs) > 1 or only_consumer(quantize.outputs[0]) is not pool:
            continue
        if pool.outputs[0].is_graph_output() or _is_integer_kernel(quantize):
            continue
        integers, readers = pool.outputs[0], list(pool.outputs[0].uses())
        options = dict[str, Any](pool.attributes)
        pooled = insert_node(pool, "MaxPool", [quantize.inputs[0]], **options).outputs[0]
        copied = insert_copy(pooled, pool)
        rounded = insert_node(pool, "QuantizeLinear", [copied, *quantize.inputs[1:]]).outputs[0]
        for reader, index in readers:
            reader.replace_input_with(index, rounded)
        rounded.type, rounded.shape = integers.type, integers.shape
        take_name(rounded, integers)
        graph.remove([pool, quantize], safe=True)


def _is_integer_kernel(quantize: ir.Node) -> bool:
    """Return whether what is rounded may be computed as integers: by such an operator, behind a DequantizeLinear."""
    node = producer(quantize.inputs[0], *_INTEGER_KERNELS)
    return node is not None and any(producer(value, "DequantizeLinear") for value in node.inputs)


def _pool_volumes_in_float(graph: ir.Graph) -> None:
    """Compute max pooling over three axes in float, between copies: a maximum is the same in both.

    ONNX Runtime's kernel for integers takes 11 times as long, and without the copies it would move the rounding in
    front. A network of two convolutions and a pooling takes 0.5x the time.
    """
    for pool in nodes(graph, "MaxPool"):
        integers, readers = pool.outputs[0], consumers(pool.outputs[0])
        is_volume = len(int_attribute(pool, "kernel_shape", ())) == 3 and len(pool.outputs) == 1
        grids = [node.inputs[1:] for node in readers if node.op_type == "DequantizeLinear" and Grid.of(node)]
        if not is_volume or not grids or len(grids) < len(readers) or integers.is_graph_output():
            continue
        dequantize = insert_node(pool, "DequantizeLinear", [source(pool), *grids[0]])
        pool.replace_input_with(0, insert_copy(dequantize.outputs[0], pool))
        first = first_consumer(integers)
        copied = insert_copy(integers, first)
        rounded = insert_node(first, "QuantizeLinear", [copied, *grids[0]]).outputs[0]
        for reader in readers:
            reader.replace_input_with(0, rounded)
        rounded.shape = integers.shape
        take_name(rounded, integers)


def _write_out_prelu(graph: ir.Graph) -> None:
    """Write PRelu as LeakyRelu if it has one slope, else as relu(x) + slope (x - relu(x)), which is exactly the same.

    The former has an integer kernel; the latter are vectorized, and the kernel of PRelu is not. An int8 ResNet-18 with
    a slope for each channel takes 0.57x the time, a float one 0.85x (AVX2: not measured).
    """
    for prelu in nodes(graph, "PRelu"):
        x, slope, before = source(prelu), source(prelu, 1), prelu.outputs[0]
        slopes = constant(slope)
        if slopes is not None and slopes.size == 1:
            after = insert_node(prelu, "LeakyRelu", [x], alpha=slopes.item()).outputs[0]
        else:
            positive = insert_node(prelu, "Relu", [x]).outputs[0]
            negative = insert_node(prelu, "Sub", [x, positive]).outputs[0]
            scaled = insert_node(prelu, "Mul", [negative, slope]).outputs[0]
            after = insert_node(prelu, "Add", [positive, scaled]).outputs[0]
        replace(before, after)
        graph.remove(prelu, safe=True)


def _divide_by_roots(graph: ir.Graph) -> None:
    """Write x (1 / sqrt(y)) as x / sqrt(y), which is rounded once less: in this form an RMS norm has a kernel.

    A small Llama takes 0.91x the time, in float and as integers (AVX2: not measured).
    """
    for inverse in nodes(graph, "Reciprocal"):
        root, product = producer(inverse.inputs[0], "Sqrt"), only_consumer(inverse.outputs[0], "Mul")
        if root is None or product is None:
            continue
        x = other_input(product, inverse.outputs[0])
        quotient, before = insert_node(product, "Div", [x, root.outputs[0]]).outputs[0], product.outputs[0]
        replace(before, quotient)
        graph.remove([product, inverse], safe=True)
