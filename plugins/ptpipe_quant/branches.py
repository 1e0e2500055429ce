"""Parallel convolutions and batch norms whose outputs are added: one convolution, as RepVGG and MobileOne are shipped.

Networks are trained with such branches (also FastViT, RepViT, RepGhost): each is an operator and a rounding.
Residual connections are none: next to a weight of 1, those of a branch that adds a little would be rounded away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.affine_folding import OPERATORS, fold_affine, foldable
from ptpipe_quant.float_nodes import is_layer
from ptpipe_quant.functional_weights import belongs_to
from ptpipe_quant.functionalize import SHAPE
from ptpipe_torch.merged_convolution import Convolution, merged

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SIGNS = {"add": 1.0, "sub": -1.0}


@dataclass(frozen=True)
class _Branch:
    """A convolution or a batch norm of `source`, or the one behind the other."""

    source: Node
    convolution: Convolution
    """That computes the same."""
    layer: Node | None
    """The call of the convolution, if there is one."""
    names: tuple[str, ...]
    """Of the layers."""


def merge_branches(graph: GraphModule, float_names: Sequence[str], *, mixed_sizes: bool) -> dict[str, list[str]]:
    """Replace sums and differences of branches by one convolution, in place.

    Return what is merged, by the name of the branch that it is part of from now on: the one with the largest kernel.
    Other branches that must be float are not merged. `float_names`: layers that must be float. `mixed_sizes`: see
    `merged`.
    """
    found: dict[str, list[str]] = {}
    if not any(_branches(graph, node) for node in graph.graph.nodes):
        return found  # spares most networks what follows
    for node in foldable(graph):
        merging = _merge(graph, node, float_names, mixed_sizes=mixed_sizes)
        if merging is not None:
            kept, other = merging
            absorbed = [inner for own in other.names for inner in (own, *found.pop(own, ()))]
            found.setdefault(kept.names[0], []).extend(absorbed)
    if found:
        graph.graph.eliminate_dead_code()
        graph.delete_all_unused_submodules()
        fold_affine(graph)  # layer scale behind a sum
        graph.recompile()
    return found


def num_sums(graph: GraphModule, float_names: Sequence[str]) -> int:
    """Return how many sums and differences of two branches a network has that could be one int8 convolution."""
    sums = (_sum(graph, node, mixed_sizes=True) for node in graph.graph.nodes)
    return sum(
        not any(belongs_to(name, float_names) for branch in found[0] for name in branch.names)
        for found in sums
        if found is not None
    )


def _merge(
    graph: GraphModule, node: Node, float_names: Sequence[str], *, mixed_sizes: bool
) -> tuple[_Branch, _Branch] | None:
    """Replace a sum of two branches by one of them, in place; return that one, then the other; None: they stay."""
    found = _sum(graph, node, mixed_sizes=mixed_sizes)
    if found is None:
        return None
    branches, (index, total) = found
    kept, other = branches[index], branches[1 - index]
    if kept.layer is None or any(belongs_to(name, float_names) for name in other.names):
        return None
    layer: Any = graph.get_submodule(str(kept.layer.target))
    layer.weight = nn.Parameter(total.weight.to(layer.weight.dtype))
    layer.bias = nn.Parameter(total.bias_K.to(layer.weight.dtype))
    behind: Any = node.args[index]
    node.replace_all_uses_with(kept.layer)
    graph.graph.erase_node(node)
    while behind is not kept.layer:  # nothing reads these any more
        before = behind.all_input_nodes[0]
        graph.graph.erase_node(behind)
        behind = before
    return kept, other


def _sum(
    graph: GraphModule, node: Node, *, mixed_sizes: bool
) -> tuple[tuple[_Branch, _Branch], tuple[int, Convolution]] | None:
    """Return the branches of a sum or a difference, and what `merged` makes of them; None if it is no such sum."""
    branches = _branches(graph, node)
    if branches is None:
        return None
    first, second = (branch.convolution for branch in branches)
    total = merged(first, second.times(_SIGNS[OPERATORS[node.target]]), mixed_sizes=mixed_sizes)
    return None if total is None else (branches, total)


def _branches(graph: GraphModule, node: Node) -> tuple[_Branch, _Branch] | None:
    """Return what a sum or a difference is of, if these are two branches from one tensor."""
    is_sum = node.op in ("call_function", "call_method") and OPERATORS.get(node.target) in _SIGNS
    is_of_two = len(node.args) == 2 and not node.kwargs and all(isinstance(value, Node) for value in node.args)
    if not is_sum or not is_of_two:
        return None
    values: Any = node.args
    first, second = (_branch(graph, value) for value in values)
    if first is None or second is None or first.source is not second.source:
        return None
    is_broadcast = values[0].meta.get(SHAPE) != values[1].meta.get(SHAPE)
    return None if is_broadcast else (first, second)


def _branch(graph: GraphModule, value: Node) -> _Branch | None:
    """Return the branch that ends in a tensor, if nothing reads the tensor but the sum."""
    value = _read(graph, value)
    if not is_layer(graph, value, *_NORMS) or len(value.users) > 1:
        return _convolution(graph, value)
    norm: Any = graph.get_submodule(str(value.target))
    if norm.running_var is None:
        return None
    source: Any = value.args[0]
    branch = _convolution(graph, _read(graph, source)) or _identity(_copied(graph, source))
    if branch is None:
        return None
    statistics = (norm.running_mean, norm.running_var)
    convolution = branch.convolution.normalized(norm.weight, norm.bias, *statistics, norm.eps)
    return _Branch(branch.source, convolution, branch.layer, (*branch.names, str(value.target)))


def _convolution(graph: GraphModule, value: Node) -> _Branch | None:
    if not is_layer(graph, value, *_CONVOLUTIONS) or len(value.users) > 1:
        return None
    layer: Any = graph.get_submodule(str(value.target))
    is_plain = type(layer) in _CONVOLUTIONS and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if not is_plain or SHAPE not in value.meta:
        return None
    weight = layer.weight.detach()
    bias_K = torch.zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    convolution = Convolution(weight, bias_K, layer.groups, layer.stride, layer.padding, layer.dilation)
    source: Any = value.args[0]
    return _Branch(_copied(graph, source), convolution, value, (str(value.target),))


def _identity(source: Node) -> _Branch | None:
    shape = source.meta.get(SHAPE, ())
    if len(shape) < 3:
        return None
    return _Branch(source, Convolution.identity(shape[1], len(shape) - 2), None, ())


def _read(graph: GraphModule, value: Node) -> Node:
    """Return the tensor that a tensor is a copy of, if nothing reads that but the copy."""
    while is_layer(graph, value, nn.Identity) and len(value.users) == 1:
        value = value.all_input_nodes[0]
    return value


def _copied(graph: GraphModule, value: Node) -> Node:
    """Return the tensor that a tensor is a copy of."""
    while is_layer(graph, value, nn.Identity):
        value = value.all_input_nodes[0]
    return value
