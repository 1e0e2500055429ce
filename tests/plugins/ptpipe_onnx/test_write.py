from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxscript import ir

from ptpipe_onnx import graph


@pytest.mark.parametrize("size", [3, 127, 128, 70_000])
def test_a_written_file_is_what_protobuf_serializes(tmp_path: Path, size: int) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size]) for name in ("x", "y"))
    arrays = {
        "float": np.arange(size, dtype=np.float32),
        "int8": np.full(size, -3, np.int8),
        "scalar": np.array(7, np.int64),
        "empty": np.empty((0, 2), np.float32),
    }
    nodes = [onnx.helper.make_node("Add", ["x", "float"], ["y"], doc_string="an annotation")]
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    proto = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], stored), ir_version=10)
    proto.metadata_props.add(key="mean", value="[0.5]")
    graph.write(ir.serde.deserialize_model(proto), tmp_path / "model.onnx")

    content = (tmp_path / "model.onnx").read_bytes()
    written = onnx.ModelProto.FromString(content)
    assert written.SerializeToString(deterministic=True) == content
    assert {t.name: onnx.numpy_helper.to_array(t).tolist() for t in written.graph.initializer} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert written.graph.node[0].doc_string == "" and written.metadata_props[0].value == "[0.5]"
    assert written.opset_import[0].version == proto.opset_import[0].version
    assert written.graph.output == proto.graph.output
