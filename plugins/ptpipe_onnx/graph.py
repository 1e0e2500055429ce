"""A few verbs over an ONNX graph. The one file that knows the exporter's intermediate representation.

A graph is `ir.Graph`: nodes in topological order, values with their producer and uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnxscript import ir

Graph: TypeAlias = ir.Graph
Model: TypeAlias = ir.Model
Node: TypeAlias = ir.Node
Value: TypeAlias = ir.Value
Array: TypeAlias = npt.NDArray[Any]

# Field numbers of onnx.proto: in ModelProto, GraphProto and TensorProto; all less than 16, so that a tag is one byte.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_LAST = 2**29 - 1


def nodes(graph: Graph, *op_types: str) -> list[Node]:
    """The nodes of these types (all where none is named), in topological order; edits leave the list alone."""
    return [node for node in graph if not op_types or (node.op_type in op_types and node.domain in ("", "ai.onnx"))]


def producer(value: Value | None, *op_types: str) -> Node | None:
    """The node that computes the value, where it is of one of these types."""
    node = None if value is None else value.producer()
    return node if node is not None and (not op_types or node.op_type in op_types) else None


def consumers(value: Value) -> list[Node]:
    """The nodes that read the value."""
    return [node for node, _ in value.uses()]


def first_consumer(value: Value) -> Node:
    """The first node, in topological order, of those that read the value."""
    readers = consumers(value)
    return next(node for node in readers[0].graph if node in readers)


def only_consumer(value: Value, *op_types: str) -> Node | None:
    """The one node that reads the value, where nothing else does and it is of one of these types."""
    readers = consumers(value)
    if len(readers) != 1 or value.is_graph_output() or (op_types and readers[0].op_type not in op_types):
        return None
    return readers[0]


def constant(value: Value | None) -> Array | None:
    """The value's content where it is known now: an initializer or a Constant node's output."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def integers(node: Node, attribute: str, default: Sequence[int]) -> tuple[int, ...]:
    """An attribute that is an integer or a list of them."""
    if attribute not in node.attributes:
        return tuple(default)
    value = node.attributes[attribute].value
    return (value,) if isinstance(value, int) else tuple(value)


def add_constant(graph: Graph, name: str, content: Array) -> Value:
    """Store an array in the file, under this name or the next free one like it."""
    unique, number = name, 1
    while unique in graph.initializers:
        unique, number = f"{name}.{number}", number + 1
    tensor = ir.tensor(np.array(content, order="C"), name=unique)
    value = ir.Value(name=unique, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def add_node(
    before: Node, op_type: str, inputs: Sequence[Value | None], num_outputs: int = 1, **attributes: Any
) -> Node:
    """Put a new node in front of another."""
    node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=num_outputs)
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return node


def replace(value: Value, replacement: Value) -> None:
    """Let everything that reads the value read the replacement; an output of the graph keeps its name."""
    if value.is_graph_output():
        name, value.name = value.name, None
        value.name, replacement.name = f"{name}.before", name
        replacement.shape, replacement.type = value.shape, value.type
    value.replace_all_uses_with(replacement, replace_graph_outputs=True)


def remove_unused(graph: Graph) -> None:
    """Drop nodes and stored arrays that lead to no output."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
            value.const_value = None  # the graph keeps counts of dropped values, and so the values themselves


def weight_bytes(graph: Graph) -> int:
    """Bytes of all stored arrays."""
    return sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)


def describe_ends(graph: Graph, batch_axis: str, input_shape_CHW: tuple[int, int, int], num_classes: int) -> None:
    """Write the shapes of input and output in plain words."""
    graph.inputs[0].shape = ir.Shape([batch_axis, *input_shape_CHW])
    graph.outputs[0].shape = ir.Shape([batch_axis, num_classes])


def write(model: Model, path: Path) -> None:
    """Write the file, without the exporter's annotations (stack traces, paths, intermediate shapes).

    Byte for byte what protobuf would serialize, which takes three more copies of the weights to do so. The model's
    arrays are released: onnxscript's rewrite rules keep the last graph that they matched.
    """
    _clear_annotations(model)
    stored = [(value.name, value.const_value) for value in model.graph.initializers.values()]
    for value in model.graph.initializers.values():
        value.const_value = None
    model.graph.initializers.clear()
    rest = ir.serde.serialize_model(model)
    graph = rest.graph
    graph.ClearField("value_info")
    arrays = [(_described(name, tensor), tensor) for name, tensor in stored if tensor is not None]
    before, after = _fields(graph, 0, _INITIALIZER - 1), _fields(graph, _INITIALIZER + 1, _LAST)
    num_bytes = sum(len(described) + tensor.nbytes for described, tensor in arrays) + len(before) + len(after)
    with path.open("wb") as file:
        file.write(_fields(rest, 0, _GRAPH - 1) + _head(_GRAPH, num_bytes) + before)
        for described, tensor in arrays:
            file.write(described)
            file.flush()  # arrays write to the file's descriptor
            tensor.tofile(file)
        file.write(after + _fields(rest, _GRAPH + 1, _LAST))


def _described(name: str, tensor: Any) -> bytes:
    """An initializer's field of a GraphProto, up to the bytes of its array."""
    proto = onnx.TensorProto(dims=tensor.shape.numpy(), data_type=tensor.dtype.value, name=name)
    content: bytes = proto.SerializeToString(deterministic=True) + _head(_RAW_DATA, tensor.nbytes)
    return _head(_INITIALIZER, len(content) + tensor.nbytes) + content


def _head(field: int, num_bytes: int) -> bytes:
    """Tag and length of a field, as varints (protobuf.dev, "Encoding")."""
    head = bytearray([field << 3 | 2])
    while num_bytes > 0x7F:
        head.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    head.append(num_bytes)
    return bytes(head)


def _fields(message: Any, first: int, last: int) -> bytes:
    """The fields of a message whose numbers are in that range, serialized."""
    part = type(message)()
    part.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        if not first <= field.number <= last:
            part.ClearField(field.name)
    content: bytes = part.SerializeToString(deterministic=True)
    return content


def _clear_annotations(model: Model) -> None:
    model.graph.name = "network"
    described = [*model.graph.inputs, *model.graph.initializers.values(), *model.graph]
    described += [value for node in model.graph for value in node.outputs]
    for item in described:
        item.metadata_props.clear()
        item.doc_string = None
    model.graph.metadata_props.clear()
