"""Names of a graph's nodes, and which of them stay float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from onnx import GraphProto, ModelProto, NodeProto

from ptpipe import StageError, nearest

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU"}
"""Operators of layers with weights."""


def name_nodes(graph: GraphProto) -> None:
    """Give a name of its own to each node that has none, or another's: quantizers know nodes by their names."""
    counts = Counter(node.name for node in graph.node)
    taken, number = set(counts), 0
    for node in graph.node:
        if node.name and counts[node.name] == 1:
            continue
        while f"{node.op_type}_{number}" in taken:
            number += 1
        node.name = f"{node.op_type}_{number}"
        taken.add(node.name)


def tensors_read(node: NodeProto) -> Iterator[str]:
    """Yield the names of what a node takes, and of what the graphs inside it (of If, Loop, Scan) read."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from tensors_read(inner)
            yield from (value.name for value in graph.output)


def has_graphs(node: NodeProto) -> bool:
    """Return whether a node has graphs inside, as If, Loop and Scan have."""
    return any(own.HasField("g") or own.graphs for own in node.attribute)


class NodeNames:
    """What the nodes of a graph may be called."""

    def __init__(self, graph: GraphProto) -> None:
        self._stored = {tensor.name for tensor in graph.initializer}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in tensors_read(node):
                self._readers.setdefault(name, []).append(node)

    def layer(self, node: NodeProto) -> str:
        """Return the name of the layer that a node computes, else its own: from its weight, or from the bias added."""
        return next(iter(self._layers(node)), node.name)

    def all(self, node: NodeProto) -> set[str]:
        """Return all that a node may be called by: its name, its operator, its layer."""
        return {node.name, node.op_type, *self._layers(node)}

    def readers(self, name: str) -> Sequence[NodeProto]:
        """Return the nodes that take this tensor, or have graphs inside that read it."""
        return self._readers.get(name, ())

    def _layers(self, node: NodeProto) -> Iterator[str]:
        added = [after for after in self.readers(node.output[0]) if after.op_type == "Add"] if node.output else []
        for tensor in (*node.input, *(name for after in added[:1] for name in after.input)):
            layer, dot, _ = tensor.removesuffix(".transposed").rpartition(".")
            if dot and tensor in self._stored:
                yield layer


def nodes_to_skip(model: ModelProto, patterns: Sequence[str], kind: str) -> list[str]:
    """Return the names of the nodes that the patterns of `skip` match. Raises StageError where one matches none."""
    names = NodeNames(model.graph)
    known = {node.name: names.all(node) for node in model.graph.node}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for own in known.values() for name in own):
            raise StageError(f"{kind}: `skip` has {pattern!r}, which matches no node {_hint(pattern, known)}")
    return [
        node for node, own in known.items() if any(fnmatchcase(name, pattern) for name in own for pattern in patterns)
    ]


def _hint(pattern: str, known: Mapping[str, set[str]]) -> str:
    words = sorted({name for own in known.values() for name in own})
    close = nearest(pattern, words)
    if close:
        return f"(did you mean {close!r}?)"
    shown = ", ".join(words[:12])
    return f"(there are {shown}{', ...' if len(words) > 12 else ''})"


def in_front_of_layers(graph: GraphProto) -> set[str]:
    """Return the names of the nodes whose outputs reach a node with weights."""
    found, needed = set[str](), set[str]()
    for node in reversed(graph.node):  # in topological order
        is_inner = not needed.isdisjoint(node.output)
        if is_inner:
            found.add(node.name)
        if is_inner or node.op_type in LAYERS:
            needed.update(node.input)
    return found
