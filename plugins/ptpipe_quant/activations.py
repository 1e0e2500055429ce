"""Find activations that are written out as several operators, and write each as the one function that it is.

GPT-2's GELU is eight operators, MobileNetV3's HardSwish often four. Rounded one by one they cost accuracy and time.
Spellings differ in order, constants and where they divide, so a spelling is recognized by what it computes: it is run
on numbers, and compared with the functions of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_quant.functionalize import TENSOR
from ptpipe_quant.relative_precision import operator_name
from ptpipe_torch.int8.tracer import Scopes

F = nn.functional

_ARITHMETIC = {
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "truediv", "div", "divide", "true_divide", "neg", "pow"),
    *("square", "abs", "exp", "expm1", "log1p", "gt", "ge", "lt", "le", "float", "clone"),
}
_BENDS = {
    *("tanh", "erf", "sigmoid", "softplus", "logsigmoid", "relu", "relu6", "hardtanh", "hardsigmoid", "clamp", "clip"),
    *("clamp_min", "clamp_max", "max", "maximum", "min", "minimum", "where"),
}
"""One of these is in each activation."""
_OPERATORS = _ARITHMETIC | _BENDS
_ENDS = {
    *("mul", "multiply", "truediv", "div", "divide", "true_divide", "add", "sub", "subtract"),
    *("max", "maximum", "where"),
}
_LAYERS = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus)
_MAX_OPERATORS = 16
_X = torch.cat([torch.linspace(-20, 20, 4001, dtype=torch.float64), torch.tensor([-1e3, -50.0, 50.0, 1e3])])
_TOLERANCE = 2e-6
"""Of the larger of 1 and |x|: constants are written with six digits or more. Both forms of GELU differ by 5e-4."""
_FUNCTIONS: Sequence[tuple[Any, Mapping[str, Any]]] = (
    (F.gelu, {"approximate": "tanh"}),
    *((function, {}) for function in (F.gelu, F.silu, F.hardswish, F.hardsigmoid, F.mish)),
)


def use_activations(graph: GraphModule, scopes: Scopes) -> None:
    """Replace operators that together are GELU, SiLU, HardSwish, hard-sigmoid, Mish or leaky ReLU by it, in place."""
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}
    is_changed = False
    for node in reversed(list(graph.graph.nodes)):
        if _name(graph, node) in _ENDS and (found := _Activation.of(graph, node, numbers)) is not None:
            found.replace(graph, node, scopes)
            is_changed = True
    if is_changed:
        graph.graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Activation:
    """A function of torch that several operators compute."""

    source: Node
    """Its input."""
    function: Any
    named: Mapping[str, Any]
    """Its other arguments."""

    @classmethod
    def of(cls, graph: GraphModule, node: Node, numbers: Mapping[Node, int]) -> _Activation | None:
        """Return the activation that ends with a node. `numbers`: of all nodes, in the order of the graph."""
        for source, operators in _expressions(graph, node, numbers):
            if not any(_name(graph, operator) in _BENDS for operator in operators):
                continue
            if (computed := _computed(graph, source, operators)) is None:
                return None
            slope = float(computed[0] / _X[0])
            leaky = [(F.leaky_relu, {"negative_slope": slope})] if 0 < slope < 1 else []
            for function, named in (*_FUNCTIONS, *leaky):
                if _is_same(computed, function(_X, **named)):
                    return cls(source, function, named)
        return None

    def replace(self, graph: GraphModule, node: Node, scopes: Scopes) -> None:
        """Write the function in the place of a node."""
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(self.function, (self.source,), dict(self.named))
        scopes[new.name] = scopes[node.name]
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)


def _expressions(graph: GraphModule, node: Node, numbers: Mapping[Node, int]) -> Iterator[tuple[Node, list[Node]]]:
    """Yield tensors of which a node is a function without further inputs, the nearest first, with its operators."""
    operators, needed = list[Node](), {node}
    while len(operators) < _MAX_OPERATORS:
        last = max(needed, key=lambda each: numbers.get(each, 0))
        if _name(graph, last) not in _OPERATORS:
            return
        operators.append(last)
        needed.remove(last)
        needed |= {source for source in last.all_input_nodes if not _is_number(graph, source)}
        if not needed:
            return
        if len(needed) == 1 and len(operators) > 1:
            yield next(iter(needed)), list(operators)


def _computed(graph: GraphModule, source: Node, operators: list[Node]) -> torch.Tensor | None:
    """Return what operators compute of `_X`; None where they are no function of each single value."""
    runner = Interpreter(graph)
    runner.env[source] = _X
    try:
        with torch.no_grad():
            for node in reversed(operators):
                for constant in node.all_input_nodes:
                    if constant not in runner.env:
                        runner.env[constant] = runner.run_node(constant)
                runner.env[node] = runner.run_node(node)
                if runner.env[node].shape != _X.shape:
                    return None
    except Exception:  # noqa: BLE001  # `max` of one tensor, for one
        return None
    computed: torch.Tensor = runner.env[operators[0]]
    return computed


def _is_same(computed: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((computed - expected).abs() <= _TOLERANCE * _X.abs().clamp(min=1)).all())


def _is_number(graph: GraphModule, node: Node) -> bool:
    """Return whether a node is a tensor of one value that is not trained."""
    if node.op != "get_attr":
        return False
    value = attrgetter(str(node.target))(graph)
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad


def _name(graph: GraphModule, node: Node) -> str:
    """Return what the function of a node is called, without a tensor in it the empty string."""
    if TENSOR not in node.meta:
        return ""
    if node.op == "call_module":
        layer = graph.get_submodule(str(node.target))
        return type(layer).__name__.lower() if type(layer) in _LAYERS else ""
    return operator_name(node)
