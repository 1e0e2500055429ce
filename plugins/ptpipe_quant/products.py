"""Write products of activations as `torch.matmul`, the one of their spellings that has an int8 form in FX quantization.

Shapes are those of `functionalize`. Names of nodes stay: messages are looked up by them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import SHAPE, TENSOR
from ptpipe_torch.int8.tracer import SOURCE_LINE, Scopes

_PRODUCTS = (operator.matmul, torch.bmm, torch.mm, torch.linalg.matmul, "bmm", "matmul", "mm")
_SECOND_OPERAND = ("other", "mat2", "tensor2")
_EINSUM = re.compile(r"((?:\.\.\.)?[a-zA-Z]+),((?:\.\.\.)?[a-zA-Z]+)->((?:\.\.\.)?[a-zA-Z]+)")
_BADDBMM = ("input", "batch1", "batch2")
"""What `baddbmm` adds, and both operands."""


def use_matmul(graph: GraphModule, scopes: Scopes) -> None:
    """Replace products of two tensors by `torch.matmul`, in place: `@`, `bmm`, `baddbmm`, `einsum`.

    An `einsum` that is no product of matrices, with batch axes that both have, stays.
    """
    writer = _Writer(graph, scopes)
    for node in list(graph.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target in _PRODUCTS:
            writer.write_product(node)
        elif node.target in (torch.baddbmm, "baddbmm"):
            writer.write_addition(node)
        elif node.target is torch.einsum:
            writer.write_einsum(node)


@dataclass(frozen=True)
class _Axes:
    """Orders of axes that make a product of matrices of an `einsum`: of both operands, and of the product behind it."""

    left: Sequence[int]
    right: Sequence[int]
    result: Sequence[int]

    @classmethod
    def of(cls, left: Sequence[str], right: Sequence[str], result: Sequence[str]) -> _Axes | None:
        """Return them for operands and a result of these axes, or None."""
        is_batch = [axis for axis in result if axis in left and axis in right]
        rows, columns = ([axis for axis in result if axis in own and axis not in is_batch] for own in (left, right))
        summed = [axis for axis in left if axis in right and axis not in result]
        if not len(rows) == len(columns) == len(summed) == 1:
            return None
        orders = [*is_batch, *rows, *summed], [*is_batch, *summed, *columns], [*is_batch, *rows, *columns]
        if any(sorted(order) != sorted(own) for order, own in zip(orders, (left, right, result), strict=True)):
            return None  # an axis occurs twice, or is summed in one operand alone
        return cls(
            [left.index(axis) for axis in orders[0]],
            [right.index(axis) for axis in orders[1]],
            [orders[2].index(axis) for axis in result],
        )


def einsum_axes(node: Node) -> tuple[list[Node], list[list[str]]] | None:
    """Return both operands of an `einsum`, and the axes of each and of the result; None where it isn't one of two."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    nodes = [operand for operand in operands if isinstance(operand, Node) and TENSOR in operand.meta]
    if not isinstance(equation, str) or len(operands) != 2 or len(nodes) != 2:
        return None
    match = _EINSUM.fullmatch(equation.replace(" ", ""))
    return match and (nodes, _letters(match.groups(), [operand.meta[TENSOR][1] for operand in nodes]))


def _letters(terms: Sequence[str], num_dims: Sequence[int]) -> list[list[str]]:
    """Return the axes of both operands and the result, with names of their own in the place of an ellipsis."""
    num_batch = [dims - len(term.lstrip(".")) for dims, term in zip(num_dims, terms[:2], strict=True)]
    num_batch.append(max(num_batch))
    return [
        [*(str(index) for index in range(number) if term.startswith(".")), *term.lstrip(".")]
        for number, term in zip(num_batch, terms, strict=True)
    ]


class GraphWriter:
    """Inserts nodes in front of one that they replace."""

    def __init__(self, graph: GraphModule, scopes: Scopes) -> None:
        self._graph, self._scopes = graph.graph, scopes

    def permuted(self, before: Node, operand: Node, order: Sequence[int]) -> Node:
        """Return the operand with its axes in another order."""
        if _is_sorted(order):
            return operand
        shape = [operand.meta[SHAPE][axis] for axis in order]
        return self.insert(before, "call_method", "permute", operand, *order, shape=shape)

    def insert(self, before: Node, op: str, target: Any, *args: Any, shape: Sequence[int] | None = None) -> Node:
        """Return a new node. `shape`: of its result, whose dtype is that of `args[0]`; None: as that of `before`."""
        with self._graph.inserting_before(before):
            node = self._graph.create_node(op, target, args)
        self._scopes[node.name] = self._scopes[before.name]
        node.meta |= {key: before.meta[key] for key in (TENSOR, SOURCE_LINE) if key in before.meta}
        if shape is not None:
            node.meta |= {TENSOR: (args[0].meta[TENSOR][0], len(shape)), SHAPE: tuple(shape)}
        return node


class _Writer(GraphWriter):
    """Replaces one node after the other."""

    def write_product(self, node: Node) -> None:
        """Replace a product that is spelled otherwise."""
        operands = [*node.args, *(node.kwargs[name] for name in _SECOND_OPERAND if name in node.kwargs)]
        if len(operands) == 2:  # else it has an output to write to
            _become(node, "call_function", torch.matmul, *operands)

    def write_addition(self, node: Node) -> None:
        """Replace `baddbmm`, beta * added + alpha * left @ right."""
        given = dict(zip(_BADDBMM, node.args, strict=False)) | node.kwargs
        if len(node.args) > len(_BADDBMM) or given.keys() - {"alpha", "beta"} != set(_BADDBMM):
            return
        added, *operands = (given[name] for name in _BADDBMM)
        beta, alpha = (given.get(name, 1) for name in ("beta", "alpha"))
        if alpha == 1 and beta == 0:  # what is added may be memory that holds no numbers
            _become(node, "call_function", torch.matmul, *operands)
            return
        product = self.insert(node, "call_function", torch.matmul, *operands)
        if beta == 0:
            _become(node, "call_function", operator.mul, product, alpha)
            return
        if alpha != 1:
            product = self.insert(node, "call_function", operator.mul, product, alpha)
        if beta != 1:
            added = self.insert(node, "call_function", operator.mul, added, beta)
        _become(node, "call_function", operator.add, product, added)

    def write_einsum(self, node: Node) -> None:
        """Replace an `einsum` that is a product of matrices."""
        found = einsum_axes(node)
        if found is None or (axes := _Axes.of(*found[1])) is None:
            return
        operands = [self.permuted(node, *pair) for pair in zip(found[0], (axes.left, axes.right), strict=True)]
        if _is_sorted(axes.result):
            _become(node, "call_function", torch.matmul, *operands)
        else:
            product = self.insert(node, "call_function", torch.matmul, *operands)
            _become(node, "call_method", "permute", product, *axes.result)


def _become(node: Node, op: str, target: Any, *args: Any) -> None:
    node.op, node.target, node.args, node.kwargs = op, target, args, {}


def _is_sorted(order: Sequence[int]) -> bool:
    return list(order) == sorted(order)
