"""Operators in place of an exported program, written as those that return a new tensor.

What shares memory is known from the tensors that torch.export traced the network with. A write to a view, as in `x[:,
0] = y`, changes what it is a view of, too: all that is read later of either are the new values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ptpipe_onnx import writes_to_views
from ptpipe_torch.torch_export import is_write, name_outputs, storages

_DROPOUTS = tuple(
    getattr(torch.ops.aten, f"{name}{suffix}").default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
)


def write_out_of_place(program: ExportedProgram) -> bool:
    """Replace all operators in place by those that return a new tensor, or none where that is not possible for all.

    Return whether none is left.
    """
    graph = program.graph_module.graph
    if not any(is_write(node) for node in graph.nodes):
        return True
    memory = _Memory(graph)
    if not memory.is_known:
        return False
    newest = _NewestValues(graph, memory)
    for node in list(graph.nodes):
        newest.visit(node)
    name_outputs(program)
    graph.eliminate_dead_code()
    return True


def is_without_effect(node: Node) -> bool:
    """Return whether a node is a dropout in eval mode: it returns its input itself, a copy only in torch's traces."""
    return node.target in _DROPOUTS and not node.args[2]


def out_of_place(target: Any) -> Any:
    """Return `relu` of `relu_`, where it changes its first argument alone, and there is such a function of the same.

    None of `transpose_` and others that change no values, but what a tensor is a view of.
    """
    first, *others = target._schema.arguments
    if torch.Tag.inplace_view in target.tags:
        return None
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or any(of.alias_info for of in others) or not first.is_write:
        return None
    wanted = [(of.name, str(of.type)) for of in (first, *others)]
    for function in (getattr(packet, overload) for overload in packet.overloads()):  # `pow_.Scalar`: pow.Tensor_Scalar
        schema = function._schema
        is_same = [(of.name, str(of.type)) for of in schema.arguments] == wanted
        if is_same and not schema.is_mutable and [str(of.type) for of in schema.returns] == ["Tensor"]:
            return function
    return None


class _Memory:
    """Which nodes of a graph share memory.

    Attributes:
        source: by view: what it is a view of. The result of an operator in place is one of what that changes.
        base: by node: the first one of those that share its memory.
        writes: the operators in place.
        is_known: whether all of these can be replaced.
    """

    def __init__(self, graph: Graph) -> None:
        self.source: dict[Node, Node] = {}
        self.base: dict[Node, Node] = {}
        self.writes = {node for node in graph.nodes if is_write(node)}
        self._same: dict[int, int] = {}
        """Memory that is only in a trace not the same."""
        self._fixed: set[Node] = set()
        """Bases of what may share memory with more than is known."""
        nodes = [node for node in graph.nodes if node.op != "output"]
        self.is_known = all(
            node.op != "get_attr" and not isinstance(node.target, torch._ops.HigherOrderOperator) for node in nodes
        ) and all(self._add(node) for node in nodes)

    def _add(self, node: Node) -> bool:
        """Find what a node shares memory with. Return False if it is in place and can't be replaced."""
        first: Any = node.args[0] if node.args else None
        if is_without_effect(node):
            self._same |= dict(zip(storages(node), self._memory_of(first), strict=True))
        sharing = [of for of in node.all_input_nodes if self._memory_of(of) & self._memory_of(node)]
        if first in sharing:
            self.source[node] = first
        self.base[node] = self.base[first] if first in sharing else node
        if node in self.writes:
            return first in sharing and self._may_write(node)
        if node.op == "placeholder" or sharing not in ([], [first]):
            self._fixed.update(self.base[of] for of in (node, *sharing))
        return True

    def _memory_of(self, node: Node) -> set[int]:
        return {self._same.get(storage, storage) for storage in storages(node)}

    def _may_write(self, node: Node) -> bool:
        changed, function = self.source[node], out_of_place(node.target)
        if function is None or self.base[node] in self._fixed:
            return False
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        if function(*args, **kwargs).dtype is not changed.meta["val"].dtype:  # in place, a result is rounded to it
            return False
        while changed in self.source:
            if changed not in self.writes and not is_without_effect(changed) and not writes_to_views.is_known(changed):
                return False
            changed = self.source[changed]
        return True


class _NewestValues:
    """The values of what is changed in place, as of one node of a graph, which is visited from its first to its last.

    Attributes:
        memory: of the graph before.
    """

    def __init__(self, graph: Graph, memory: _Memory) -> None:
        self.memory = memory
        self._graph = graph
        self._num_writes: dict[Node, int] = {}
        """To the memory of each base."""
        self._values: dict[Node, tuple[int, Node]] = {}
        """By node: how often its memory had been changed, and the value that it then had."""

    def visit(self, node: Node) -> None:
        """Let a node read the newest values, and return a new one where it is in place."""
        for value in node.all_input_nodes:
            if (newest := self._newest(value, node)) is not value:
                node.replace_input_with(value, newest)
        if node in self.memory.writes:
            self._write(node)
        elif node.op != "output":
            self._values[node] = self._count(node), node

    def _count(self, node: Node) -> int:
        return self._num_writes.get(self.memory.base[node], 0)

    def _newest(self, node: Node, reader: Node) -> Node:
        """Return a node's newest value; a view of what has changed is taken once more, before its reader."""
        count, value = self._values[node]
        if count < self._count(node):
            source = self.memory.source[node]
            value = self._newest(source, reader)
            if node not in self.memory.writes:
                with self._graph.inserting_before(reader):
                    view = self._graph.node_copy(node)
                view.args = (value, *node.args[1:])
                value = view
            self._values[node] = self._count(node), value
        return value

    def _write(self, node: Node) -> None:
        """Replace an operator in place, and give all that its result is a view of a new value."""
        path = [self.memory.source[node]]
        while path[-1] in self.memory.source:
            path.append(self.memory.source[path[-1]])
        before = {view: self._newest(view, node) for view in path}
        node.target = out_of_place(node.target)
        self._num_writes[self.memory.base[node]] = count = self._count(node) + 1
        self._values[node] = count, node
        value = node
        with self._graph.inserting_before(node.next):
            for index, view in enumerate(path):
                if not isinstance(view.meta["val"], torch.Tensor):  # the parts of a split: one of them has changed
                    continue
                self._values[view] = count, value
                whole = next((of for of in path[index + 1 :] if isinstance(of.meta["val"], torch.Tensor)), None)
                if whole is not None and view not in self.memory.writes and not is_without_effect(view):
                    value = writes_to_views.write(view, before[whole], value)
