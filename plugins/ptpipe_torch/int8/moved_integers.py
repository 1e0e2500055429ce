"""Take int8 tensors apart as integers.

FX has no int8 form of `chunk`, `split`, `unbind` and `x[:, :8]`: it would make floats of a tensor, and integers of each
piece again, though all are on one grid (see `fixed_ranges.observe_pieces`). Integers are pieces as well.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.observers import fixed_grid, observer_at

SPLITS: tuple[Any, ...] = ("chunk", "split", "tensor_split", "unbind")
SPLITS += tuple(getattr(torch, name) for name in SPLITS)
"""Operators that return pieces of a tensor in a tuple."""
_MOVES = ("contiguous", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view")
_MOVES += tuple(getattr(torch, name) for name in ("flatten", "narrow", "squeeze", "transpose", "unsqueeze"))


def whole_of(node: Node) -> Node | None:
    """Return the tensor that a node takes a piece of, `x` of `x.chunk(2)[0].transpose(1, 2)`; None for all others.

    A piece may be moved, and be one of a piece.
    """
    is_piece = False
    while _is_piece(node) or node.target in (*SPLITS, *_MOVES):
        is_piece |= _is_piece(node)
        node = node.all_input_nodes[0]
    return node if is_piece else None


def _is_piece(node: Node) -> bool:
    if node.target is not operator.getitem:
        return False
    index: Any = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts)


def pieces_on_one_grid(prepared: GraphModule) -> set[str]:
    """Return the names of the pieces that are observed on the grid of the tensor that they are pieces of."""
    names, others = set[str](), set[str]()
    for call in prepared.graph.find_nodes(op="call_module"):
        own = observer_at(prepared, call)
        tensor = None if own is None else whole_of(call.all_input_nodes[0])
        if own is not None and tensor is not None:
            is_alike = observer_at(prepared, tensor) is own and not fixed_grid(own)
            (names if is_alike else others).add(call.all_input_nodes[0].name)
    return names - others


def take_integers(converted: GraphModule, names: set[str]) -> None:
    """Let these pieces be taken of the integers of an int8 network, in place.

    `names`: from `pieces_on_one_grid`; the nodes have them as their stack trace.
    """
    copies: dict[Node, Node] = {}
    for quantize in converted.graph.find_nodes(op="call_function", target=torch.quantize_per_tensor):
        piece = quantize.all_input_nodes[0]
        tensor = whole_of(piece) if piece.stack_trace in names else None
        if tensor is None or tensor.target != "dequantize":
            continue
        quantize.replace_all_uses_with(_of_integers(converted, piece, copies))
        node = quantize
        while not node.users:  # a piece may have other readers
            before = node.all_input_nodes[0]
            converted.graph.erase_node(node)
            node = before
    converted.recompile()


def _of_integers(converted: GraphModule, node: Node, copies: dict[Node, Node]) -> Node:
    """Return what a piece is of integers, or the integers of a tensor; its size is read from these, too."""
    if node in copies:
        return copies[node]
    source = node.all_input_nodes[0]
    if node.target == "dequantize":
        copies[node] = source
    else:
        integers = _of_integers(converted, source, copies)
        with converted.graph.inserting_before(node):
            copies[node] = converted.graph.node_copy(node, lambda each: integers if each is source else each)
    for reader in [reader for reader in node.users if reader.target == "size"]:
        reader.replace_input_with(node, copies[node])
    return copies[node]
