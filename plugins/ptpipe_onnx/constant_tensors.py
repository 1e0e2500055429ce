"""Tensors that a network fills in place from constants alone, as the masks of shifted windows: their values instead.

Such a mask depends on the sizes of an image alone. As operators, those of a Swin take a third of its export.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ptpipe_onnx.writes_in_place import is_without_effect
from ptpipe_torch.torch_export import is_write, storages

_MAX_BYTES = 2**20
"""Of a tensor that is evaluated: a file would hold it."""
_aten = torch.ops.aten
_FILLED = (_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default)
_FILLED_LIKE = (_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default)


def evaluate_constants(program: ExportedProgram) -> None:
    """Replace what is filled in place by nothing but constants with its values, in place."""
    graph = program.graph_module.graph
    if not any(is_write(node) for node in graph.nodes):
        return
    evaluation = _Evaluation(program)
    for node in graph.nodes:
        evaluation.visit(node)
    evaluated = evaluation.filled()
    for node in evaluated:
        readers = [user for user in node.users if user not in evaluated]
        if readers:
            constant = _add_constant(program, node, evaluation.values[node])
            for reader in readers:
                reader.replace_input_with(node, constant)
    for node in reversed(evaluated):
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _add_constant(program: ExportedProgram, node: Node, value: torch.Tensor) -> Node:
    """Give a program one more constant, for a node's value, in front of its inputs."""
    graph, specs = program.graph_module.graph, program.graph_signature.input_specs
    place = next((index for index, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
    name = f"filled_{node.name}"
    with graph.inserting_before(graph.find_nodes(op="placeholder")[place]):
        constant: Node = graph.placeholder(name)
    constant.meta["val"] = node.meta["val"]
    specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(constant.name), constant.name))
    program.constants[constant.name] = value.clone(memory_format=torch.contiguous_format)
    return constant


class _Evaluation:
    """A run of the operators that need nothing but constants, in their order.

    Attributes:
        values: of the nodes that were evaluated.
    """

    def __init__(self, program: ExportedProgram) -> None:
        constants = program.graph_signature.inputs_to_lifted_tensor_constants
        self._constants = {node: program.constants[name] for node, name in constants.items()}
        self.values: dict[Node, Any] = {}
        self._written: set[int] = set()
        """Memory that was written in the evaluation."""
        self._unknown: set[int] = set()
        """Memory that something else writes, too, or that was read before it was written again."""
        self._read: set[int] = set()

    def visit(self, node: Node) -> None:
        """Evaluate a node, if it needs nothing but constants."""
        if node.name in self._constants:
            self.values[node] = self._constants[node.name]
            self._unknown.update(storages(node))
        elif node.op == "output" or is_without_effect(node):
            for source in node.all_input_nodes:
                self._unknown.update(storages(source))
        elif node.op != "placeholder":
            self._visit_operator(node)

    def _visit_operator(self, node: Node) -> None:
        own = set(storages(node))
        can_evaluate = self._can_evaluate(node)
        if is_write(node):
            self._unknown |= (own & self._read) if can_evaluate else own
            self._written |= own
            can_evaluate = can_evaluate and not own & self._unknown
            if not can_evaluate:
                self._unknown |= own
                self.values = {of: value for of, value in self.values.items() if not own & {*storages(of)}}
        for source in node.all_input_nodes:
            self._read |= {*storages(source)} - (own if can_evaluate else set())
        if can_evaluate:
            self.values[node] = self._evaluated(node)

    def filled(self) -> list[Node]:
        """Return the nodes whose memory was written, by nodes that were evaluated alone, in their order."""
        filled = self._written - self._unknown
        return [node for node in self.values if filled & {*storages(node)}]

    def _can_evaluate(self, node: Node) -> bool:
        target, value = node.target, node.meta.get("val")
        if target is operator.getitem:
            return node.args[0] in self.values
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor | list | tuple):
            return False
        leaves = tree_leaves(value)
        if torch.Tag.nondeterministic_seeded in target.tags or not all(_is_small(of) for of in leaves):
            return False
        needed = node.all_input_nodes
        if target in _FILLED or target in _FILLED_LIKE:
            needed = [of for of in needed if of is not node.args[0]]
        return all(of in self.values for of in needed)

    def _evaluated(self, node: Node) -> Any:
        target: Any = node.target
        if target in _FILLED or target in _FILLED_LIKE:  # they take no values from their first argument
            first: Any = node.args[0]
            like: Any = first.meta["val"] if target in _FILLED_LIKE else first.meta["val"].new_empty(())
            # Its strides are the result's, too, which decide what is a view of it.
            source = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype)
            args = source, *map_arg(node.args[1:], self.values.__getitem__)
        else:
            args = map_arg(node.args, self.values.__getitem__)
        return target(*args, **map_arg(node.kwargs, self.values.__getitem__))


def _is_small(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() * value.element_size() <= _MAX_BYTES
    )
