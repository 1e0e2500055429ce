"""Store weights that a forward pass computes from parameters alone, as parameters, which layers can own.

Weight standardization (`F.conv2d(x, standardized(self.weight))`) and joined biases (`torch.cat((q, zeros, v))`) are
such. Weight norm and other parametrizations are stored by `ptpipe_torch.model.reparametrized`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_quant.functional_weights import FUNCTIONS, arguments_of, belongs_to, is_view, tensors_of_layers
from ptpipe_quant.functionalize import SHAPE, TENSOR
from ptpipe_torch.int8.tensor_properties import reads_device
from ptpipe_torch.int8.tracer import Scopes

_WEIGHTS = ("weight", "matrix", "bias")
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "poisson")


def store_computed_weights(graph: GraphModule, scopes: Scopes, leaves: Sequence[str]) -> list[str]:
    """Compute such weights once, in place; return the names of the parameters that have their values now.

    A weight takes the place of the largest parameter that it is computed from. One stays as it is if it is random, if
    something else reads one of those parameters (a mask that several weights are multiplied by may be read), or if
    `leaves` names one.
    """
    stored: list[str] = []
    for node in list(graph.graph.nodes):
        if node.op in ("call_function", "call_method") and node.target in FUNCTIONS:
            given = arguments_of(node)
            sources = [source for name in _WEIGHTS if isinstance(source := given.get(name), Node)]
            found = [expression for source in sources if (expression := _Expression.of(graph, source)) is not None]
            if _are_storable(found, node, leaves):  # together: they may be computed from the same parameters
                stored += _store(found, node, scopes)
                continue
            for expression in found:
                if _are_storable([expression], node, leaves):
                    stored += _store([expression], node, scopes)
    return stored


class _Expression:
    """Operators that compute a tensor from parameters and buffers alone."""

    def __init__(self, graph: GraphModule, nodes: Sequence[Node]) -> None:
        self.graph = graph
        self.nodes = nodes
        """In the order of the graph; the last is the tensor."""

    @classmethod
    def of(cls, graph: GraphModule, tensor: Node) -> _Expression | None:
        """Return the expression of a tensor; None if it depends on more, or is a parameter or a view of one."""
        found, waiting = {tensor}, [tensor]
        while waiting:
            node = waiting.pop()
            if reads_device(node):  # of the inputs, and of the parameters with them
                continue
            if node.op != "get_attr" and not (_is_fixed(node) and node.all_input_nodes):
                return None
            waiting += [before for before in node.all_input_nodes if before not in found]
            found |= set(node.all_input_nodes)
        nodes = [node for node in graph.graph.nodes if node in found]
        is_computed = any(
            node.op != "get_attr" and not (len(node.all_input_nodes) == 1 and is_view(node)) for node in nodes
        )
        return cls(graph, nodes) if is_computed else None

    def sources(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters and buffers by name."""
        names = (str(node.target) for node in self.nodes if node.op == "get_attr")
        values = {name: operator.attrgetter(name)(self.graph) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def trained(self) -> set[str]:
        """Return the names of the parameters that training changes."""
        return {name for name, tensor in self.sources().items() if tensor.requires_grad}

    def varying(self) -> set[Node]:
        """Return the nodes whose values training changes."""
        trained, found = self.trained(), set[Node]()
        for node in self.nodes:
            if (node.op == "get_attr" and str(node.target) in trained) or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def value(self) -> torch.Tensor:
        """Return the tensor."""
        runner = Interpreter(self.graph)
        device = next(iter(self.sources().values())).device
        # A network may be built in inference mode, whose tensors can't be trained.
        with torch.inference_mode(False), torch.no_grad():
            for node in self.nodes:
                runner.env[node] = device if reads_device(node) else runner.run_node(node)
            value: torch.Tensor = runner.env[self.nodes[-1]].clone()
        return value


def _are_storable(expressions: Sequence[_Expression], reader: Node, leaves: Sequence[str]) -> bool:
    """Return whether nothing but `reader` depends on their trained parameters, and `leaves` names no source of them."""
    if not expressions:
        return False
    sources, own = _sources(expressions), _own_sources(expressions, reader)
    inside = _inside(expressions, reader)
    varying = {node for expression in expressions for node in expression.varying()}
    return (
        all(expression.trained() <= own.keys() for expression in expressions)
        and len(_names(expressions, own)) == len(expressions)
        and not any(belongs_to(name, leaves) for name in sources)
        and all(inside.issuperset(node.users) for node in varying)
        and tensors_of_layers(expressions[0].graph).isdisjoint(sources.values())
    )


def _sources(expressions: Sequence[_Expression]) -> dict[str, torch.Tensor]:
    return {name: tensor for expression in expressions for name, tensor in expression.sources().items()}


def _inside(expressions: Sequence[_Expression], reader: Node) -> set[Node]:
    return {reader, *(node for expression in expressions for node in expression.nodes)}


def _own_sources(expressions: Sequence[_Expression], reader: Node) -> dict[str, torch.Tensor]:
    """Return the sources that nothing else in the network reads."""
    inside, graph = _inside(expressions, reader), expressions[0].graph
    shared = {
        str(node.target)
        for node in graph.graph.find_nodes(op="get_attr")
        if node not in inside or not inside.issuperset(node.users)
    }
    return {name: tensor for name, tensor in _sources(expressions).items() if name not in shared}


def _names(expressions: Sequence[_Expression], own: Mapping[str, torch.Tensor]) -> list[str]:
    """Return, for each of the first expressions that have one, the largest own source that no other has taken.

    One that is trained comes first: a mask may be as large as the weight.
    """
    names: list[str] = []
    for expression in expressions:
        free = {name: own[name] for name in expression.sources() if name in own and name not in names}
        if not free:
            break
        names.append(max(free, key=lambda name: (free[name].requires_grad, free[name].numel())))
    return names


def _store(expressions: Sequence[_Expression], reader: Node, scopes: Scopes) -> list[str]:
    """Let `reader` take parameters with the values; return their names."""
    module, own = expressions[0].graph, _own_sources(expressions, reader)
    names, values = _names(expressions, own), [expression.value() for expression in expressions]
    trained = [bool(expression.trained()) for expression in expressions]
    for source in own:
        path, _, attribute = source.rpartition(".")
        delattr(module.get_submodule(path), attribute)
    for expression, name, value, is_trained in zip(expressions, names, values, trained, strict=True):
        path, _, attribute = name.rpartition(".")
        module.get_submodule(path).register_parameter(attribute, nn.Parameter(value, requires_grad=is_trained))
        with module.graph.inserting_before(reader):
            stored = module.graph.get_attr(name)
        stored.meta |= {**reader.meta, TENSOR: (value.dtype, value.dim()), SHAPE: tuple(value.shape)}
        scopes[stored.name] = scopes[reader.name]
        reader.replace_input_with(expression.nodes[-1], stored)
    for node in reversed([node for node in module.graph.nodes if any(node in part.nodes for part in expressions)]):
        if not node.users:
            module.graph.erase_node(node)
    return names


def _is_fixed(node: Node) -> bool:
    """Return whether an operator has no weights of its own and draws no numbers."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and not any(word in name for word in _RANDOM)
