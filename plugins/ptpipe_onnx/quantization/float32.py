"""Float files of other precisions in float32, the only one whose layers ONNX Runtime's quantizers take."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from ptpipe import Context
from ptpipe_torch import OnnxFile

OTHER_PRECISIONS = {
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}
_TYPE_ATTRIBUTES = ("to", "dtype", "stash_type")


def in_float32(ctx: Context, file: OnnxFile) -> OnnxFile:
    """Return a float file as it is where its weights are float32, else with all tensors of their type as float32.

    Whatever an operator takes of such a type, it takes of float32. `ctx`: its scratch folder gets the file.
    """
    if file.precision not in OTHER_PRECISIONS:
        return file
    ctx.log(f"converted from {file.precision} to float32")
    content = onnx.load(file.path, load_external_data=False)
    type_ = OTHER_PRECISIONS[file.precision]
    _convert_graph(content.graph, type_)
    for function in content.functions:
        _convert_nodes(function.node, type_)
    path = ctx.scratch / "float32.onnx"
    onnx.save_model(content, path)
    return OnnxFile(path, file.signature)


def _convert_graph(graph: GraphProto, type_: int) -> None:
    for tensor in graph.initializer:
        _convert_tensor(tensor, type_)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == type_:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    _convert_nodes(graph.node, type_)


def _convert_nodes(nodes: Iterable[NodeProto], type_: int) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == type_:
                attribute.i = TensorProto.FLOAT
            for tensor in (attribute.t, *attribute.tensors):
                _convert_tensor(tensor, type_)
            for graph in (attribute.g, *attribute.graphs):
                _convert_graph(graph, type_)


def _convert_tensor(tensor: TensorProto, type_: int) -> None:
    if tensor.data_type == type_:
        array = np.asarray(numpy_helper.to_array(tensor)).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
