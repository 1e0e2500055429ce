"""Queries and edits of an ONNX graph in onnx_ir, the intermediate representation of torch's exporter.

A graph is an `ir.Graph`: nodes in topological order, values with their producer and uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from ptpipe_torch import Signature

Array: TypeAlias = npt.NDArray[Any]

# Field numbers of onnx.proto: in ModelProto, GraphProto and TensorProto; all less than 16, so that a tag is one byte.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_LAST = 2**29 - 1
_ELEMENTWISE = ("QuantizeLinear", "DequantizeLinear", "Clip", "Relu")


def nodes(graph: ir.Graph, *op_types: str) -> list[ir.Node]:
    """Return the nodes of these types (all if none is given), in topological order; safe to edit the graph over."""
    return [node for node in graph if not op_types or (node.op_type in op_types and node.domain in ("", "ai.onnx"))]


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node that computes the value, if it is of one of these types."""
    node = None if value is None else value.producer()
    return node if node is not None and (not op_types or node.op_type in op_types) else None


def consumers(value: ir.Value) -> list[ir.Node]:
    """Return the nodes that read the value."""
    return [node for node, _ in value.uses()]


def first_consumer(value: ir.Value) -> ir.Node:
    """Return the first node, in topological order, that reads the value."""
    readers = consumers(value)
    assert readers[0].graph is not None
    return next(node for node in readers[0].graph if node in readers)


def only_consumer(value: ir.Value, *op_types: str) -> ir.Node | None:
    """Return the node that reads the value, if it is the only one and of one of these types."""
    readers = consumers(value)
    if len(readers) != 1 or value.is_graph_output() or (op_types and readers[0].op_type not in op_types):
        return None
    return readers[0]


def source(node: ir.Node, index: int = 0) -> ir.Value:
    """Return an input of a node that must be present."""
    value = node.inputs[index]
    assert value is not None, node
    return value


def constant(value: ir.Value | None) -> Array | None:
    """Return the value as an array if it is constant: an initializer or the output of a Constant node."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def other_input(node: ir.Node, value: ir.Value) -> ir.Value:
    """Return the other input of an operator of two, which reads `value` once."""
    (other,) = (own for own in node.inputs if own is not None and own is not value)
    return other


def known_shape(value: ir.Value) -> tuple[int | str | None, ...] | None:
    """Return the sizes of a value's axes, each a number, a symbol or unknown; None if not even their number is known.

    Operators of one element at a time have outputs of the shape of their first input.
    """
    while value.shape is None and (node := producer(value, *_ELEMENTWISE)) is not None:
        value = source(node)
    return None if value.shape is None else tuple(size if isinstance(size, int) else size.value for size in value.shape)


def int_attribute(node: ir.Node, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return an attribute that is an integer or a list of integers."""
    if name not in node.attributes:
        return tuple(default)
    value = node.attributes[name].value
    return (value,) if isinstance(value, int) else tuple(value)


def add_initializer(graph: ir.Graph, name: str, content: Array) -> ir.Value:
    """Add an initializer under this name, with a number appended if it is taken."""
    unique, number = name, 1
    while unique in graph.initializers:
        unique, number = f"{name}.{number}", number + 1
    tensor = ir.tensor(np.array(content, order="C"), name=unique)
    value = ir.Value(name=unique, shape=ir.Shape(content.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def store(value: ir.Value, content: Array) -> None:
    """Give an initializer another content, of another shape perhaps."""
    value.const_value, value.shape = ir.tensor(content, name=value.name), ir.Shape(content.shape)


def bias_of(convolution: ir.Node) -> Array | None:
    """Return the bias of a convolution, zeros where it has none; None if it is not constant."""
    if len(convolution.inputs) > 2 and convolution.inputs[2] is not None:
        return constant(convolution.inputs[2])
    weight = constant(convolution.inputs[1])
    return None if weight is None else np.zeros(weight.shape[0], weight.dtype)


def set_parameter(convolution: ir.Node, index: int, content: Array) -> None:
    """Give a convolution another weight or bias. Its name stays, or is made of the weight's: layers are known by it."""
    assert convolution.graph is not None
    convolution.resize_inputs(max(index + 1, len(convolution.inputs)))
    value, weight_name = convolution.inputs[index], str(source(convolution, 1).name)
    if value is not None and len(value.uses()) == 1:
        store(value, content)
        return
    name = f"{weight_name.rpartition('.')[0] or weight_name}.bias" if value is None else str(value.name)
    convolution.replace_input_with(index, add_initializer(convolution.graph, name, content))


def owns_weight(layer: ir.Node, weight: ir.Node) -> bool:
    """Return whether nothing but this layer reads a DequantizeLinear, and nothing else the integers behind it."""
    return only_consumer(weight.outputs[0]) is layer and len(source(weight).uses()) == 1


def insert_node(
    before: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], num_outputs: int = 1, **attributes: Any
) -> ir.Node:
    """Insert a new node in front of another one."""
    node = ir.node(op_type, inputs, attributes, num_outputs=num_outputs)
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return node


def insert_reshape(before: ir.Node, value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Insert a Reshape of `value` to `shape` in front of a node; return its output. 0: as before; -1: what is left."""
    assert before.graph is not None
    sizes = add_initializer(before.graph, "sizes", np.array(shape, np.int64))
    return insert_node(before, "Reshape", [value, sizes]).outputs[0]


def insert_behind(value: ir.Value, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
    """Insert a new node of a value and these inputs in front of all that reads the value; return the new value.

    It takes the name.
    """
    readers = list(value.uses())
    result = insert_node(first_consumer(value), op_type, [value, *inputs], **attributes).outputs[0]
    for reader, index in readers:
        reader.replace_input_with(index, result)
    take_name(result, value)
    return result


def insert_restoring(value: ir.Value, form: str, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
    """Insert an operator whose output is what the value was; return it. `form`: suffix for the value's own name."""
    result = insert_behind(value, op_type, *inputs, **attributes)
    result.type, result.shape = value.type, value.shape
    value.name, value.shape = f"{result.name}{form}", None
    return result


def replace(value: ir.Value, replacement: ir.Value) -> None:
    """Replace all uses of a value; an output of the graph keeps its name, shape and type."""
    if value.is_graph_output():
        name, value.name = value.name, None
        value.name, replacement.name = f"{name}.before", name
        replacement.shape, replacement.type = value.shape, value.type
    value.replace_all_uses_with(replacement, replace_graph_outputs=True)


def insert_copy(value: ir.Value, before: ir.Node) -> ir.Value:
    """Insert a maximum of one tensor, which is a copy, in front of a node; no runtime is known to remove it."""
    return insert_node(before, "Max", [value]).outputs[0]


def separate(node: ir.Node) -> None:
    """Let a node read a copy of its first input: runtimes don't fuse the two around it."""
    node.replace_input_with(0, insert_copy(source(node), node))


def take_name(value: ir.Value, former: ir.Value) -> None:
    """Give a value the name of the one that it stands for from now on, which keeps it with a suffix."""
    name, former.name = former.name, f"{former.name}.former"
    value.name = name


def remove_unused(model: ir.Model) -> None:
    """Remove nodes and initializers that no output depends on."""
    with dropped_arrays_released(model):
        common.RemoveUnusedNodesPass()(model)


def keep_outputs_inside(model: ir.Model) -> None:
    """Insert an Identity, in place, where a branch returns a value of an outer graph: a pass (onnx-ir 1.1) drops it."""
    for graph in model.graphs():
        for index, output in enumerate(graph.outputs):
            node = output.producer()
            is_outer = node.graph is not graph if node is not None else output not in graph.initializers.values()
            if graph is not model.graph and is_outer:
                identity = ir.node("Identity", [output])
                graph.append(identity)
                graph.outputs[index] = identity.outputs[0]


def register_constants(model: ir.Model) -> None:
    """Register constants, in place, that nodes read and no graph has.

    A rule of onnxscript (0.7) names the shapes of all that flattens one value alike, and the last one alone stays.
    """
    registered = {value for graph in model.graphs() for value in graph.initializers.values()}
    for value in [value for node in model.graph.all_nodes() for value in node.inputs if value is not None]:
        if value.const_value is not None and value.producer() is None and value not in registered:
            model.graph.register_initializer(value)
            registered.add(value)


@contextmanager
def dropped_arrays_released(model: ir.Model) -> Iterator[None]:
    """Release the arrays of initializers that are removed inside the `with`: the graph keeps counts of their values,
    and with these the values themselves.
    """
    stored = list(model.graph.initializers.values())
    yield
    kept = set(model.graph.initializers.values())
    for value in stored:
        if value not in kept:
            value.const_value = None


def weight_bytes(graph: ir.Graph) -> int:
    """Return the number of bytes of all initializers."""
    return sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)


def set_shapes(graph: ir.Graph, signature: Signature) -> None:
    """Set the shapes of inputs and outputs, with the signature's symbols."""
    for values, specs in ((graph.inputs, signature.inputs), (graph.outputs, signature.outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.shape = ir.Shape(spec.shape)


def write(model: ir.Model, path: Path) -> None:
    """Write the file, without the exporter's annotations (stack traces, paths, intermediate shapes).

    Byte for byte what protobuf would serialize, which takes three more copies of the weights to do so. The model's
    arrays are released: onnxscript's rewrite rules keep the last graph that they matched.
    """
    _clear_annotations(model)
    stored: list[tuple[str, Any]] = [
        (str(value.name), value.const_value) for value in model.graph.initializers.values()
    ]
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


def _clear_annotations(model: ir.Model) -> None:
    model.graph.name = "network"
    common.ClearMetadataAndDocStringPass()(model)
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):  # not in that pass
        value.metadata_props.clear()
        value.doc_string = None
