from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe_onnx.kernels import Kernels

ENDS = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("images", "logits")]
ARRAYS = [
    numpy_helper.from_array(np.array(0.1, np.float32), "s"),
    numpy_helper.from_array(np.array(3, np.uint8), "z"),
    numpy_helper.from_array(np.array(5, np.uint8), "low"),
    numpy_helper.from_array(np.array(90, np.uint8), "high"),
    numpy_helper.from_array(np.array(0.5, np.float32), "float_low"),
    numpy_helper.from_array(np.array(0.9, np.float32), "float_high"),
]


def write(path: Path, *nodes: onnx.NodeProto) -> Path:
    graph = helper.make_graph(nodes, "g", ENDS[:1], ENDS[1:], ARRAYS)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_a_clip_counts_as_what_it_gets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "m.onnx",
        helper.make_node("Clip", ["images", "float_low", "float_high"], ["clipped"]),
        helper.make_node("Sin", ["clipped"], ["waves"]),
        helper.make_node("QuantizeLinear", ["waves", "s", "z"], ["integers"]),
        helper.make_node("Transpose", ["integers"], ["turned"]),
        helper.make_node("Clip", ["turned", "low", "high"], ["cut"]),
        helper.make_node("Transpose", ["cut"], ["back"]),
        helper.make_node("DequantizeLinear", ["back", "s", "z"], ["floats"]),
        helper.make_node("Cos", ["floats"], ["logits"]),
    )
    kernels = Kernels.of(path, tmp_path)
    assert kernels.integer == Counter({"Clip": 1})
    assert kernels.float == Counter({"Clip": 1, "Sin": 1, "Cos": 1})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx"]
    assert capfd.readouterr() == ("", "")
