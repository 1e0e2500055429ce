"""Sessions of ONNX Runtime whose integer sums are exact on every processor.

On x86 processors without VNNI, its usual kernels add pairs of 8-bit products in 16 bits, which can saturate. Its option
`session.x64quantprecision` turns int8 weights into uint8 ones there, for slower kernels that don't; elsewhere it
changes nothing. It refuses a graph in which two nodes read one int8 tensor (1.32): each gets a copy first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptpipe import host

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


def may_saturate() -> bool:
    """Return whether usual kernels may saturate on this processor; True for an x86 processor of unknown features."""
    flags = host.cpu_flags()
    return host.is_x86() and (flags is None or not flags.intersection(host.VNNI_FLAGS))


def saturates_unlike_target(path: Path) -> bool:
    """Return whether usual kernels may saturate here, and not on the processors that a file was exported for.

    Those of `backend: qnnpack` are phones, whose sums are exact. `path`: of a file that is an int8 one; of whom nothing
    is known (another program wrote it) runs as it runs here.
    """
    if not may_saturate():
        return False
    import onnx

    stored = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    return stored.get("backend") == "qnnpack" and stored.get("saturating_layers_without_vnni", "[]") != "[]"


def exact_session(path: Path, options: Any) -> Any:
    """Return a session of a self-contained file. `options`: an `onnxruntime.SessionOptions`, which is changed."""
    from ptpipe_torch.ort import ort

    content: str | bytes = str(path)
    if may_saturate():
        import onnx

        options.add_session_config_entry("session.x64quantprecision", "1")
        content = with_separate_weights(onnx.load(path, load_external_data=False)).SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def with_separate_weights(model: ModelProto) -> ModelProto:
    """Give each node that reads a stored int8 tensor a copy of its own, in place; return the model.

    One in the body of a loop gets it there: ONNX Runtime does not look for it outside.
    """
    _separate_dequantize_nodes(model.graph)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == tensor.INT8}
    taken: set[str] = set()
    for graph in _graphs(model.graph):
        for node in graph.node:
            for position, name in enumerate(node.input):
                if name in taken or (name in tensors and graph is not model.graph):
                    copy = graph.initializer.add()
                    copy.CopyFrom(tensors[name])
                    copy.name = node.input[position] = f"{name}/{graph.name}/{len(graph.initializer)}"
                elif name in tensors:
                    taken.add(name)
    return model


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _separate_dequantize_nodes(graph: GraphProto) -> None:
    """Give each reader of a dequantized weight its own DequantizeLinear."""
    stored = {tensor.name for tensor in graph.initializer}
    of_weights = {
        node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in stored
    }
    nodes: list[NodeProto] = []
    taken: set[str] = set()
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name in taken:
                copy = type(node)()
                copy.CopyFrom(of_weights[name])
                copy.name = copy.output[0] = node.input[position] = f"{name}/{len(nodes)}"
                nodes.append(copy)
            elif name in of_weights:
                taken.add(name)
        nodes.append(node)
    if len(nodes) > len(graph.node):
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
