"""Find the clips that stay float, since ONNX Runtime's quantizer would clip for all readers, or for none.

It takes a ReLU or Clip for a part of the layer in front, and gives its input the range of its output, also where the
input is an output of the file. In the form of quantized operators it drops the clip even where others read its input.
"""

from __future__ import annotations

from onnx import GraphProto

from ptpipe_onnx.quantization.nodes import NodeNames

_CLIPS = ("Clip", "Relu")


def shared_clips(graph: GraphProto, format_: str) -> list[str]:
    """Return the names of the nodes that clip what is also read by others, of those that `format_` gets wrong."""
    names, outputs = NodeNames(graph), {value.name for value in graph.output}

    def is_shared(value: str, name: str) -> bool:
        others = [node for node in names.readers(value) if node.name != name]
        return value in outputs or any(format_ == "qoperator" or value not in node.input for node in others)

    return [node.name for node in graph.node if node.op_type in _CLIPS and is_shared(node.input[0], node.name)]
