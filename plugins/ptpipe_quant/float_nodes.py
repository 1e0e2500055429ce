"""Which operators of a traced network must stay float."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import SEVERAL, SHAPE, TENSOR
from ptpipe_quant.normalize import JOINS
from ptpipe_quant.relative_precision import operators_of_relative_precision
from ptpipe_torch.int8.tensor_properties import reads_device
from ptpipe_torch.parity.rankings import TARGETS as RANKINGS

_ARITHMETIC = (operator.add, operator.mul, torch.add, torch.mul)
_ARITHMETIC_METHODS = ("add", "mul")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FACTORIES = (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)
MOVES = (
    torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze,
    "flatten", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "contiguous",
)  # fmt: skip
"""What moves elements of one tensor, in the spellings that `normalize` leaves."""
_POOLINGS = (nn.functional.max_pool1d, nn.functional.max_pool2d, nn.functional.max_pool3d)
_LIKE = (
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
    torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like,
)  # fmt: skip
_SUMS = (torch.bmm, torch.cdist, torch.einsum, torch.matmul, torch.mean, torch.norm, torch.sum, "mean", "norm", "sum")
_SOFTMAX = (torch.softmax, nn.functional.softmax, "softmax")
_MASKING = (
    operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div,
    torch.masked_fill, torch.where, torch.reshape, torch.tanh,
    "add", "sub", "mul", "div", "masked_fill", "reshape", "tanh",
)  # fmt: skip

_FILLING = (torch.masked_fill, torch.where, "masked_fill")

_RANKED = "topk or sort ranks its outputs, of which many would be equal if they were rounded"
_OTHER_NUMBERS = (
    "its numbers are not those of float32, which int8 stands for; as float32 (.float()) it could become int8"
)
_EXPECTATION = "it computes the mean of a distribution (softmax), which would be one of 256 numbers"


def operators_to_leave_float(graph: GraphModule) -> list[Node]:
    """Return the operators for which one of the reasons in this module, or `relative_precision`, holds."""
    constants = operators_on_constants(graph)
    found = [
        *(*operators_on_integers(graph), *operators_converted_wrongly(graph), *constants),
        *(*operators_on_made_tensors(graph, constants), *operators_on_other_numbers(graph), *masked_softmax(graph)),
        *(*products_without_kernel(graph), *operators_of_relative_precision(graph, set(constants))),
        *(*operators_with_several_results(graph), *operators_behind_layers(graph), *operators_that_are_ranked(graph)),
        *expectations(graph),
    ]
    return list(dict.fromkeys(found))


def operators_behind_layers(graph: GraphModule) -> list[Node]:
    """Return the concatenations, sums and products behind the last layers, and what is behind these.

    In int8 all that is joined is on one grid: beside boxes in pixels, a detector's scores of 0 to 1 would all be 0. The
    box itself, an anchor and a distance from it, would have one of 256 positions. No layer reads the results, so that
    int8 would save little.
    """
    behind_layers, found = _behind_layers(graph), dict[Node, None]()
    for node in graph.graph.nodes:
        combines = node.target in JOINS or _is_arithmetic(node)
        follows = node.target is not torch.matmul and any(source in found for source in node.all_input_nodes)
        if node in behind_layers and node.op != "output" and (combines or follows):
            found[node] = None
    return list(found)


def expectations(graph: GraphModule) -> list[Node]:
    """Return the last layers, and products with constants, that take the probabilities of a softmax.

    They compute the mean of a distribution, as heads of detectors do for each side of a box: a number that has more
    than 256 values, of few products.
    """
    behind_layers, constants = _behind_layers(graph), set(operators_on_constants(graph))
    found = []
    for node in graph.graph.nodes:
        is_last = node.op != "output" and bool(node.users) and behind_layers.issuperset(node.users)
        is_layer_with_weights = node.op == "call_module" and has_weights(graph, node)
        if not is_last or not (is_layer_with_weights or node.target is torch.matmul):
            continue
        varying = [source for source in node.all_input_nodes if source.op != "get_attr" and source not in constants]
        if len(varying) == 1 and _is_softmax(graph, _unmoved(graph, varying[0])):
            found.append(node)
    return found


def _unmoved(graph: GraphModule, node: Node) -> Node:
    """Return what computes the elements that a node has in another shape or order."""
    while node.target in MOVES or is_layer(graph, node, nn.Flatten):
        node = node.all_input_nodes[0]
    return node


def _behind_layers(graph: GraphModule) -> set[Node]:
    """Return the nodes that no layer with weights is behind, and which are none themselves."""
    found: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        is_last = node.users and found.issuperset(node.users) and not has_weights(graph, node)
        if node.op == "output" or is_last:
            found.add(node)
    return found


def operators_on_constants(graph: GraphModule) -> list[Node]:
    """Return the operators that do not depend on the inputs: what they compute becomes a constant in a file."""
    constants: dict[Node, None] = {}
    for node in graph.graph.nodes:
        is_operator = node.op in ("call_function", "call_method", "call_module")
        is_constant = is_operator and all(source in constants for source in node.all_input_nodes)
        if node.op == "get_attr" or is_constant or reads_device(node):
            constants[node] = None
    return [node for node in constants if node.op != "get_attr"]


def operators_on_made_tensors(graph: GraphModule, constants: Iterable[Node]) -> list[Node]:
    """Return the operators on tensors that are made of sizes (`torch.zeros((len(x), 8))`), and what joins them.

    They have no observer, which FX (torch 2.13) looks for in front of a concatenation. `constants`: which they may be
    combined with, see `operators_on_constants`.
    """
    made: dict[Node, None] = {}
    fixed = {*constants, *graph.graph.find_nodes(op="get_attr")}
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method") and _has_tensors(node):
            tensors = [source for source in node.all_input_nodes if _has_tensors(source)]
            is_made = any(source in made for source in tensors) if tensors else node.target in _FACTORIES
            if is_made and fixed.union(made).issuperset(tensors):
                made[node] = None
    joins = (node for node in graph.graph.nodes if node.target in JOINS and node not in made)
    return [*made, *(node for node in joins if any(source in made for source in node.all_input_nodes))]


def operators_that_are_ranked(graph: GraphModule) -> list[Node]:
    """Return the layers, and what is behind them, whose values `topk` or `sort` take the positions of.

    Rounded values are often equal, and which of equal ones comes first differs from runtime to runtime: an expert that
    a router chooses, or a box that a detector keeps, would be another one. Sums of many rounded values, as distances
    between points, are seldom equal: layers in front of such stay int8.
    """
    rankings = [node for node in graph.graph.nodes if node.target in RANKINGS and _gives_positions(node)]
    found, pending = dict.fromkeys(rankings), list(rankings)
    while pending:
        for source in _with_values_read(pending.pop()):
            if source in found or not _has_tensors(source) or source.target in _SUMS:
                continue
            is_layer_with_weights = has_weights(graph, source)
            if not is_layer_with_weights or source.op == "call_module":
                found[source] = None
            if not is_layer_with_weights:
                pending.append(source)
    return list(found)


def _with_values_read(node: Node) -> Sequence[Node]:
    """Return the inputs of a node without those that give it a type and a device alone."""
    if node.target in _LIKE:
        return ()
    return node.all_input_nodes[:1] if node.target == "type_as" else node.all_input_nodes


def layers_left_float(graph: GraphModule) -> dict[str, str]:
    """Return the layers with weights that `operators_to_leave_float` names, and why."""
    by_reason = {
        _RANKED: operators_that_are_ranked(graph),
        _EXPECTATION: expectations(graph),
        _OTHER_NUMBERS: operators_on_other_numbers(graph),
    }
    named = [(node, reason) for reason, nodes in by_reason.items() for node in nodes if node.op == "call_module"]
    return {str(node.target): reason for node, reason in named if has_weights(graph, node)}


def _gives_positions(ranking: Node) -> bool:
    """Return whether something reads the second result of `topk` or `sort`, or the only one of `argsort`."""
    if not ranking.meta.get(SEVERAL):
        return True
    parts = [user.args[1] if user.target in (operator.getitem, getattr) else None for user in ranking.users]
    return any(part not in (0, "values") for part in parts)


def masked_softmax(graph: GraphModule) -> list[Node]:
    """Return each softmax of attention, behind a product or a mask, and what masks its input: -inf has no range."""
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        if not _is_softmax(graph, node):
            continue
        passed, waiting, is_attention = {node: None}, list(node.all_input_nodes[:1]), False
        while waiting:
            source = waiting.pop()
            is_attention |= source.target in (torch.matmul, *_FILLING)
            if source.target in _MASKING and source not in passed:
                passed[source] = None
                waiting += [before for before in source.all_input_nodes if TENSOR in before.meta]
        if is_attention:
            found |= passed
    return list(found)


def _is_softmax(graph: GraphModule, node: Node) -> bool:
    return node.target in _SOFTMAX or is_layer(graph, node, nn.Softmax)


def products_without_kernel(graph: GraphModule) -> list[Node]:
    """Return the products for which torch (2.13) has no int8 kernel.

    Their batch axes differ, they are vectors, or what `einsum` computes is no product of matrices.
    """
    products = graph.graph.find_nodes(op="call_function", target=torch.matmul)
    einsums = graph.graph.find_nodes(op="call_function", target=torch.einsum)
    return [
        *(node for node in products if not _has_kernel([source.meta.get(SHAPE) for source in node.all_input_nodes])),
        *(node for node in einsums if len(node.all_input_nodes) > 1),
    ]


def _has_kernel(shapes: Sequence[Sequence[int] | None]) -> bool:
    known = [shape for shape in shapes if shape is not None]
    return len({tuple(shape[:-2]) for shape in known}) <= 1 and all(len(shape) >= 2 for shape in known)


def operators_on_integers(graph: GraphModule) -> list[Node]:
    """Return the operators that compute or take integers or truth values, and those whose results become such.

    Rounding to a grid in front of `x.long()`, `x > 0` or `x.argmax(1)` would change the integers. The operators are
    followed back to the last layer with weights.
    """
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        if not _is_float(node):
            _add_with_sources(graph, node, found)
        elif any(not _is_float(source) for source in node.all_input_nodes) and not has_weights(graph, node):
            found[node] = None
    return list(found)


def operators_on_other_numbers(graph: GraphModule) -> list[Node]:
    """Return the operators that compute or take complex numbers, as the Fourier transforms in front of a network do.

    Or numbers of float64, float16 or bfloat16: int8 tensors stand for those of float32.
    """
    operators = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    return [node for node in operators if any(map(_has_other_numbers, (node, *node.all_input_nodes)))]


def operators_converted_wrongly(graph: GraphModule) -> list[Node]:
    """Return the operators whose int8 form in torch (2.13) is another function.

    That of `x + 3` and `2 * x` has a grid of its own, but observers put the result on the grid of x, where
    2 * sigmoid(x) saturates at 1, and so does a ReLU behind it; `add` loses its `alpha`; a batch norm behind a layer
    with a batch norm leaves that layer without an output scale.
    """
    wrong = [node for node in graph.graph.nodes if _is_with_number(node) or _is_second_batch_norm(graph, node)]
    relus = [user for node in wrong for user in node.users if is_layer(graph, user, nn.ReLU)]
    return list(dict.fromkeys([*wrong, *relus]))


def operators_with_several_results(graph: GraphModule) -> list[Node]:
    """Return the layers without weights and the poolings that return a tuple, as those with indices do.

    FX observes what they return as if it were a tensor.
    """
    several = [node for node in graph.graph.nodes if node.meta.get(SEVERAL)]
    return [
        node
        for node in several
        if node.target in _POOLINGS or (node.op == "call_module" and not has_weights(graph, node))
    ]


def _is_arithmetic(node: Node) -> bool:
    return node.target in (_ARITHMETIC_METHODS if node.op == "call_method" else _ARITHMETIC)


def _is_with_number(node: Node) -> bool:
    if not _is_arithmetic(node):
        return False
    tensors = [operand for operand in node.args if isinstance(operand, Node) and TENSOR in operand.meta]
    return len(tensors) < 2 or bool(node.kwargs.get("alpha", 1) != 1)


def _is_second_batch_norm(graph: GraphModule, node: Node) -> bool:
    return is_layer(graph, node, *_BATCH_NORMS) and is_layer(graph, node.args[0], *_BATCH_NORMS)


def is_layer(graph: GraphModule, node: Any, *types: type[nn.Module]) -> bool:
    """Return whether this is a node that calls a layer of one of these types."""
    is_call = isinstance(node, Node) and node.op == "call_module"
    return is_call and isinstance(graph.get_submodule(str(node.target)), types)


def _add_with_sources(graph: GraphModule, node: Node, found: dict[Node, None]) -> None:
    pending = [node]
    while pending:
        node = pending.pop()
        if node in found or has_weights(graph, node):
            continue
        found[node] = None
        pending += [source for source in node.all_input_nodes if TENSOR in source.meta]


def _has_tensors(node: Node) -> bool:
    """Return whether a node is a tensor, or several, as those of `torch.meshgrid`."""
    return TENSOR in node.meta or bool(node.meta.get(SEVERAL))


def _has_other_numbers(node: Node) -> bool:
    return _is_float(node) and TENSOR in node.meta and node.meta[TENSOR][0] is not torch.float32


def _is_float(node: Node) -> bool:
    dtype: torch.dtype = node.meta[TENSOR][0] if TENSOR in node.meta else torch.float32
    return dtype.is_floating_point or dtype.is_complex


def has_weights(graph: GraphModule, node: Node) -> bool:
    """Return whether a node is a layer with weights, or no operator at all."""
    if node.op == "call_module":
        return any(True for _ in graph.get_submodule(str(node.target)).parameters())
    return node.op not in ("call_function", "call_method")
