"""Operators whose numbers need relative precision, which the equal steps of a grid don't have.

Logarithms, roots and divisors amplify what is small: on an 8-bit grid of 0 to 100, a variance of 0.1 is 0, and its
inverse root anything. So what they take stays float, back to the last layer or int8 operator, and so do the
normalizations that are written out with them: RMSNorm, layer norm over channels, global response norm. In a file these
are float operators between one DequantizeLinear and one QuantizeLinear, as the norms of `torch.nn` are. So do powers
that are averaged in front of a root, as in generalized mean pooling. Spectrograms in front of a network stay float with
their filter bank, a fixed matrix.

So do angles: on a grid of 0 to 512, the positions of a text, a step is two radians.
"""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import SEVERAL, TENSOR

_LOGARITHMS = {"log", "log2", "log10", "log1p"}
_INVERSES = {"rsqrt", "reciprocal"}
_ANGULAR = {"sin", "cos", "tan"}
_DIVISIONS = {"truediv", "div", "divide", "true_divide"}
_POOLINGS = {
    getattr(nn, layer): function
    for n in (1, 2, 3)
    for layer, function in ((f"AvgPool{n}d", f"avg_pool{n}d"), (f"AdaptiveAvgPool{n}d", f"adaptive_avg_pool{n}d"))
}
"""Layers, and the functions that they call."""
_REDUCTIONS = {"mean", "sum", "var", "std", "amax", "amin", "max", "min", "logsumexp"}
_REDUCTIONS |= {"norm", "vector_norm", "linalg_vector_norm"}
_REDUCTIONS |= {name for name in _POOLINGS.values() if name.startswith("adaptive")}  # `normalize` writes means as these
_MOVES = {
    *("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "expand", "expand_as"),
    *("contiguous", "getitem", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "select"),
    *("movedim", "moveaxis", "swapaxes", "swapdims", "pad", "pad_with_input", "unfold"),
}
"""Names in all spellings; other modules list those, as targets, that have an int8 form (`float_nodes.MOVES`)."""
_JOINS = {"cat", "concat", "concatenate", "stack"}
_CASTS = {"float", "double", "to", "type_as", "_to_copy"}
_MADE = {"full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros"}
_MATRIX_PRODUCTS = {"matmul", "bmm", "einsum"}
_PRODUCTS = {"mul", "multiply"}
_SUMS = {"add", "sub", "subtract"}
_ARITHMETIC = {*_PRODUCTS, *_SUMS, *_DIVISIONS, "pow", "square", "abs", "neg", "exp", "clamp", "clamp_min", "clip"}

_PASSED = {*_ARITHMETIC, *_MOVES, *_JOINS, *_CASTS, *_POOLINGS.values()}
"""What an argument of a steep function is followed through."""


def operators_of_relative_precision(graph: GraphModule, constants: set[Node]) -> list[Node]:
    """Return these operators. `constants`: what does not depend on the inputs."""
    return list(_Search(graph, constants).found)


class _Search:
    def __init__(self, graph: GraphModule, constants: set[Node]) -> None:
        self._graph, self._constants = graph, constants
        self.found: dict[Node, None] = {}
        steep = {node: value for node in graph.graph.nodes if (value := self._argument(node)) is not None}
        self.found |= dict.fromkeys(steep)
        for node in steep:
            self._add_results(node, is_factor=operator_name(node) in {"pow", *_INVERSES, *_DIVISIONS})
        for argument in reversed(steep.values()):
            self._add_argument(argument)
        for node in reversed(graph.graph.nodes):
            is_arithmetic = self._is_activation(node) and operator_name(node) in _ARITHMETIC
            if is_arithmetic and node.users and self._is_read_by_found(node):
                self.found[node] = None

    def _argument(self, node: Node) -> Node | None:
        """Return the activation that a steep function takes; None if this is no such function."""
        name, value = operator_name(node), None
        if name in {"sqrt", *_LOGARITHMS, *_INVERSES, *_ANGULAR} or (name == "pow" and _is_steep_power(node)):
            value = node.args[0] if node.args else None
        elif name in _DIVISIONS:
            value = node.args[1] if len(node.args) > 1 else None
        return value if isinstance(value, Node) and self._is_activation(value) else None

    def _is_activation(self, node: Node) -> bool:
        return _has_values(node) and node.op != "get_attr" and node not in self._constants

    def _add_argument(self, node: Node) -> None:
        """Add an argument of a steep function, and what computes it."""
        if node in self.found or not self._is_activation(node):
            return
        name = self._name(node)
        is_alone = name in _PASSED and self._is_read_by_found(node)
        if name in _REDUCTIONS or is_alone or self._is_filter_bank(node):
            self.found[node] = None
            for source in node.all_input_nodes:
                self._add_argument(source)

    def _add_results(self, node: Node, *, is_factor: bool) -> None:
        """Add what scales and shifts a result by constants and, if it is a factor, what it is multiplied by."""
        for user in node.users:
            name = operator_name(user)
            others = [value for value in user.args if isinstance(value, Node) and value is not node]
            by_constant = not any(map(self._is_activation, others))
            if user in self.found or name not in _PRODUCTS | _SUMS | _MOVES:
                continue
            if by_constant or (is_factor and name in _PRODUCTS):
                self.found[user] = None
                self._add_results(user, is_factor=is_factor and name in _MOVES)

    def _is_read_by_found(self, node: Node) -> bool:
        """Return whether these alone take a node's values; others may read its size."""
        return all(user in self.found or user.target == "size" for user in node.users)

    def _is_filter_bank(self, node: Node) -> bool:
        """Return whether a node is a fixed matrix, a convolution or a product in front of all layers with weights."""
        if not self._is_fixed_layer(node) and operator_name(node) not in _MATRIX_PRODUCTS:
            return False
        waiting, seen = self._tensors_of(node), set[Node]()
        while waiting:
            source = waiting.pop()
            if source.op == "get_attr" and not _is_fixed(self._graph, source):
                return False
            if source.op == "call_module" and any(True for _ in self._layer(source).parameters()):
                return False
            waiting += [before for before in self._tensors_of(source) if before not in seen]
            seen.update(source.all_input_nodes)
        return True

    def _tensors_of(self, node: Node) -> list[Node]:
        """Return the tensors whose values a node takes."""
        sources = () if operator_name(node) in _MADE else node.all_input_nodes
        return [source for source in sources if _has_values(source)]

    def _is_fixed_layer(self, node: Node) -> bool:
        if node.op != "call_module":
            return False
        weights = list(self._layer(node).parameters())
        return bool(weights) and not any(weight.requires_grad for weight in weights)

    def _name(self, node: Node) -> str:
        return _POOLINGS.get(type(self._layer(node)), "") if node.op == "call_module" else operator_name(node)

    def _layer(self, node: Node) -> nn.Module:
        return self._graph.get_submodule(str(node.target))


def _has_values(node: Node) -> bool:
    """Return whether a node is a tensor, or a tuple of some."""
    return TENSOR in node.meta or (bool(node.meta.get(SEVERAL)) and node.target not in ("size", getattr))


def _is_fixed(graph: GraphModule, node: Node) -> bool:
    """Return whether a constant of the graph is none that is trained."""
    return not getattr(operator.attrgetter(str(node.target))(graph), "requires_grad", False)


def _is_steep_power(node: Node) -> bool:
    exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("exponent")
    if isinstance(exponent, Node):  # most are trained, so any
        return True
    return isinstance(exponent, int | float) and (exponent < 0 or exponent != int(exponent))


def operator_name(node: Node) -> str:
    """Return what a function or method is called."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).removeprefix("aten::")
    return str(getattr(node.target, "__name__", ""))
