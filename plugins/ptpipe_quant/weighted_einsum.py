"""Write `einsum` of activations and a weight as a product of matrices, which then becomes a linear layer.

`torch.einsum("bnd,dhk->bhnk", x, self.w)`: each axis of the weight is either summed or the result's alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import SHAPE, TENSOR
from ptpipe_quant.products import einsum_axes
from ptpipe_torch.int8.tracer import SOURCE_LINE, Scopes


def use_matrices(graph: GraphModule, scopes: Scopes) -> None:
    """Replace each such `einsum` by `torch.matmul` with a view of the weight, in place; others stay."""
    constants: set[Node] = set()
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
                _write(graph, scopes, node, (x, weight), product)


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


def _write(
    graph: GraphModule, scopes: Scopes, node: Node, operands: tuple[Node, Node], product: _LinearProduct
) -> None:
    num_summed = product.num_summed

    def put(op: str, target: Any, args: tuple[Any, ...], shape: Sequence[int]) -> Node:
        with graph.graph.inserting_before(node):
            made = graph.graph.create_node(op, target, args)
        scopes[made.name] = scopes[node.name]
        made.meta |= {SOURCE_LINE: node.meta.get(SOURCE_LINE, ""), SHAPE: tuple(shape)}
        made.meta[TENSOR] = (node.meta[TENSOR][0], len(shape))
        return made

    def permuted(operand: Node, order: Sequence[int]) -> Node:
        if list(order) == sorted(order):
            return operand
        return put("call_method", "permute", (operand, *order), [operand.meta[SHAPE][axis] for axis in order])

    x, weight = permuted(operands[0], product.left), permuted(operands[1], product.right)
    rows_shape, columns_shape = x.meta[SHAPE][:-num_summed], weight.meta[SHAPE][num_summed:]
    sizes = math.prod(weight.meta[SHAPE][:num_summed]), math.prod(columns_shape)
    if num_summed > 1:
        x = put("call_method", "flatten", (x, -num_summed), (*rows_shape, sizes[0]))
    if len(weight.meta[SHAPE]) > 2:
        weight = put("call_method", "reshape", (weight, *sizes), sizes)
    result = put("call_function", torch.matmul, (x, weight), (*rows_shape, sizes[1]))
    if len(columns_shape) > 1:
        result = put("call_method", "unflatten", (result, -1, columns_shape), (*rows_shape, *columns_shape))
    node.replace_all_uses_with(permuted(result, product.result))
    graph.graph.erase_node(node)
