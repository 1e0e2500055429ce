"""Write `einsum` of activations and a weight as a product of matrices, which then becomes a linear layer.

`torch.einsum("bnd,dhk->bhnk", x, self.w)`: each axis of the weight is either summed or the result's alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import SHAPE
from ptpipe_quant.products import GraphWriter, einsum_axes
from ptpipe_torch.int8.tracer import Scopes


def use_matrices(graph: GraphModule, scopes: Scopes) -> None:
    """Replace each such `einsum` by `torch.matmul` with a view of the weight, in place; others stay."""
    writer, constants = GraphWriter(graph, scopes), set[Node]()
    for node in list(graph.graph.nodes):
        sources = node.all_input_nodes
        if node.op == "get_attr" or (node.op != "output" and sources and constants.issuperset(sources)):
            constants.add(node)
        elif node.target is torch.einsum and (found := einsum_axes(node)) is not None:
            operands, (*axes, result) = found
            (x, x_axes), (weight, weight_axes) = sorted(
                zip(operands, axes, strict=True), key=lambda of: of[0] in constants
            )
            product = _LinearProduct.of(x_axes, weight_axes, result)
            if product is not None and weight in constants:
                node.replace_all_uses_with(_write(writer, node, (x, weight), product))
                graph.graph.erase_node(node)


@dataclass(frozen=True)
class _LinearProduct:
    """Orders of axes, and how many axes of the weight are summed."""

    left: Sequence[int]
    """Of the activations, such that those that are summed are last."""
    right: Sequence[int]
    """Of the weight, such that those that are summed are first."""
    result: Sequence[int]
    """Of what remains of both, in that order."""
    num_summed: int

    @classmethod
    def of(cls, left: Sequence[str], right: Sequence[str], result: Sequence[str]) -> _LinearProduct | None:
        """Return that of an `einsum` of activations and a weight with these axes, or None."""
        rows, columns = [axis for axis in left if axis not in right], [axis for axis in right if axis not in left]
        summed = [axis for axis in right if axis in left]
        remaining = [*rows, *columns]
        is_repeated = any(len({*axes}) < len(axes) for axes in (left, right))
        if is_repeated or not summed or not columns or sorted(remaining) != sorted(result):
            return None
        return cls(
            [left.index(axis) for axis in (*rows, *summed)],
            [right.index(axis) for axis in (*summed, *columns)],
            [remaining.index(axis) for axis in result],
            len(summed),
        )


def _write(writer: GraphWriter, node: Node, operands: tuple[Node, Node], product: _LinearProduct) -> Node:
    """Return what replaces the `einsum`."""
    num_summed = product.num_summed
    x, weight = (writer.permuted(node, *of) for of in zip(operands, (product.left, product.right), strict=True))
    rows_shape, columns_shape = x.meta[SHAPE][:-num_summed], weight.meta[SHAPE][num_summed:]
    sizes = math.prod(weight.meta[SHAPE][:num_summed]), math.prod(columns_shape)
    if num_summed > 1:
        x = writer.insert(node, "call_method", "flatten", x, -num_summed, shape=(*rows_shape, sizes[0]))
    if len(weight.meta[SHAPE]) > 2:
        weight = writer.insert(node, "call_method", "reshape", weight, *sizes, shape=sizes)
    result = writer.insert(node, "call_function", torch.matmul, x, weight, shape=(*rows_shape, sizes[1]))
    if len(columns_shape) > 1:
        shape = (*rows_shape, *columns_shape)
        result = writer.insert(node, "call_method", "unflatten", result, -1, columns_shape, shape=shape)
    return writer.permuted(node, result, product.result)
