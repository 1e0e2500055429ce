"""Store weights that a forward pass computes from parameters alone, as parameters, which layers can own.

Weight standardization (`F.conv2d(x, standardized(self.weight))`) and joined biases (`torch.cat((q, zeros, v))`) are
such. Weight norm and other parametrizations are stored by `layer_forms.store_weights`.
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
    something else reads one of those parameters, or if `leaves` names one.
    """
    stored = []
    for node in list(graph.graph.nodes):
        if node.op in ("call_function", "call_method") and node.target in FUNCTIONS:
            given = arguments_of(node)
            for source in [given.get(name) for name in _WEIGHTS]:
                expression = _Expression.of(graph, source) if isinstance(source, Node) else None
                if expression is not None and expression.is_storable(node, leaves):
                    stored.append(expression.store(node, scopes))
    return stored


class _Expression:
    """Operators that compute a tensor from parameters and buffers alone."""

    def __init__(self, graph: GraphModule, nodes: Sequence[Node]) -> None:
        self._graph = graph
        self._nodes = nodes
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

    def is_storable(self, reader: Node, leaves: Sequence[str]) -> bool:
        """Return whether nothing but `reader` depends on the parameters, none of which belongs to `leaves`."""
        sources, graph = self._sources(), self._graph.graph
        if not sources or any(belongs_to(name, leaves) for name in sources):
            return False
        inside = {*self._nodes, reader}
        readers = {node for node in graph.find_nodes(op="get_attr") if str(node.target) in sources}
        return (
            readers <= inside
            and all(inside.issuperset(node.users) for node in self._nodes)
            and tensors_of_layers(self._graph).isdisjoint(sources.values())
        )

    def store(self, reader: Node, scopes: Scopes) -> str:
        """Let `reader` take a parameter with the value; return its name."""
        sources = self._sources()
        value, graph = self._value(), self._graph.graph
        is_trained = any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in sources.values())
        name = max(sources, key=lambda source: sources[source].numel())
        for source in sources:
            path, _, attribute = source.rpartition(".")
            delattr(self._graph.get_submodule(path), attribute)
        path, _, attribute = name.rpartition(".")
        owner = self._graph.get_submodule(path)
        owner.register_parameter(attribute, nn.Parameter(value, requires_grad=is_trained))
        with graph.inserting_before(reader):
            stored = graph.get_attr(name)
        stored.meta |= {**reader.meta, TENSOR: (value.dtype, value.dim()), SHAPE: tuple(value.shape)}
        scopes[stored.name] = scopes[reader.name]
        reader.replace_input_with(self._nodes[-1], stored)
        for node in reversed(self._nodes):
            graph.erase_node(node)
        return name

    def _sources(self) -> Mapping[str, torch.Tensor]:
        names = (str(node.target) for node in self._nodes if node.op == "get_attr")
        values = {name: operator.attrgetter(name)(self._graph) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def _value(self) -> torch.Tensor:
        runner = Interpreter(self._graph)
        device = next(iter(self._sources().values())).device
        # A network may be built in inference mode, whose tensors can't be trained.
        with torch.inference_mode(False), torch.no_grad():
            for node in self._nodes:
                runner.env[node] = device if reads_device(node) else runner.run_node(node)
            value: torch.Tensor = runner.env[self._nodes[-1]].clone()
        return value


def _is_fixed(node: Node) -> bool:
    """Return whether an operator has no weights of its own and draws no numbers."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and not any(word in name for word in _RANDOM)
