"""Convolutions of each sample with kernels of its own, written as products of matrices.

Networks that compute kernels (StyleGAN's modulated convolutions, CondConv, the correlation of trackers) call one
convolution with a group for each sample, or for each of its channels. ONNX has no numbers of groups that depend on the
batch.

Shape legend: G groups, C inputs and O outputs of each, H and W height and width, K positions of a kernel, L of its
places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ptpipe_onnx.decompositions import TRANSPOSED_CONVOLUTIONS
from ptpipe_torch.torch_export import insert_call, name_outputs

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default, *TRANSPOSED_CONVOLUTIONS)
_OF_NAMED_PADDING = (_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding)


def multiply_kernels_of_samples(program: ExportedProgram) -> None:
    """Write such convolutions of images of one size as products, in place."""
    for node in list(_of_samples(program.graph, _CONVOLUTIONS)):
        if _has_one_size(node):
            write = _convolved if node.target is _aten.conv2d.default else _convolved_transposed
            with node.graph.inserting_before(node):
                node.replace_all_uses_with(write(node))
            node.graph.erase_node(node)
    name_outputs(program)


def without_products(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yield such convolutions as can't be written so, and why."""
    for node in _of_samples(graph, _CONVOLUTIONS):
        if not _has_one_size(node):
            yield node, "{} with a group for each sample has no ONNX form but for images of one size"
    for node in _of_samples(graph, _OF_NAMED_PADDING):
        yield node, "{} with a group for each sample has no ONNX form but with padding in numbers"


def _of_samples(graph: Graph, targets: Sequence[Any]) -> Iterator[Node]:
    for target in targets:
        for node in graph.find_nodes(op="call_function", target=target):
            if isinstance(_options(node)["groups"], Node):
                yield node


def _has_one_size(node: Node) -> bool:
    """Return whether height and width are known, before and after, and all groups are in one image."""
    source: Any = node.args[0]
    shapes = [source.meta["val"].shape, node.meta["val"].shape]
    return all(len(shape) == 4 and shape[0] == 1 and isinstance(prod(shape[2:]), int) for shape in shapes)


def _options(node: Node) -> dict[str, Any]:
    """Return all arguments of a convolution by their names."""
    target: Any = node.target
    arguments = target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    options = {argument.name: argument.default_value for argument in arguments} | given | node.kwargs
    pairs = ("stride", "padding", "dilation")
    return {name: [*value] * (3 - len(value)) if name in pairs else value for name, value in options.items()}


def _output_size(node: Node) -> list[int]:
    return [*node.meta["val"].shape[2:]]


def _windows(operator: Any, arguments: tuple[Any, ...], node: Node, kernel_size: list[int], *sizes: int) -> Node:
    """Insert an operator on windows like those of the convolution, which returns these sizes for each group.

    torch's own trace of it would fix the number of groups.
    """
    window = (_options(node)[name] for name in ("dilation", "padding", "stride"))
    result = node.graph.call_function(operator, (*arguments, kernel_size, *window))
    source = arguments[0].meta["val"]
    result.meta["val"] = source.new_empty([source.shape[0], *sizes])
    return result


def _convolved(node: Node) -> Node:
    """Insert (G, O, C K) times (G, C K, L)."""
    graph, options = node.graph, _options(node)
    source, weight = options["input"], options["weight"]
    _, num_inputs, *kernel_size = weight.meta["val"].shape
    images_GCHW = _reshaped(graph, source, options["groups"], -1, *source.meta["val"].shape[2:])
    num_rows = num_inputs * prod(kernel_size)
    columns = _windows(_aten.im2col.default, (images_GCHW,), node, kernel_size, num_rows, prod(_output_size(node)))
    rows = _reshaped(graph, weight, options["groups"], -1, num_rows)
    return _with_bias(node, insert_call(graph, _aten.matmul.default, rows, columns))


def _convolved_transposed(node: Node) -> Node:
    """Insert (G, O K, C) times (G, C, L), whose values are added up at the K places that each belongs to."""
    graph, options = node.graph, _options(node)
    source, weight = options["input"], options["weight"]
    _, num_outputs, *kernel_size = weight.meta["val"].shape
    places = _reshaped(graph, source, options["groups"], -1, prod(source.meta["val"].shape[2:]))
    rows = _reshaped(graph, weight, options["groups"], -1, num_outputs * prod(kernel_size))
    columns = insert_call(graph, _aten.matmul.default, insert_call(graph, _aten.transpose.int, rows, 1, 2), places)
    size_HW = _output_size(node)
    return _with_bias(
        node, _windows(_aten.col2im.default, (columns, size_HW), node, kernel_size, num_outputs, *size_HW)
    )


def _with_bias(node: Node, product: Node) -> Node:
    """Insert what gives a product the convolution's shape and adds its bias."""
    result = _reshaped(node.graph, product, 1, -1, *_output_size(node))
    bias = _options(node)["bias"]
    if bias is not None:
        result = insert_call(node.graph, _aten.add.Tensor, result, _reshaped(node.graph, bias, 1, -1, 1, 1))
    return result


def _reshaped(graph: Graph, value: Node, *shape: Any) -> Node:
    return insert_call(graph, _aten.reshape.default, value, [*shape])
