"""Files whose ids have another width than the data set's. Shape legend: N samples, L tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe import StageError
from ptpipe.testing import Bench
from ptpipe_data import load_arrays
from ptpipe_zoo import onnx_model

pytest_plugins = ["ptpipe.testing"]

SCORES_V = np.arange(20, dtype=np.float32)
IDS_NL = np.random.default_rng(0).integers(0, 20, (12, 3))


def write(path: Path, type_: int, name: str) -> None:
    """Write a file that looks ids up, in a branch too."""
    outputs = [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)]
    branch = helper.make_graph([helper.make_node("Gather", ["scores", name], ["inner"])], "branch", [], outputs)
    nodes = [
        helper.make_node("If", ["yes"], ["inside"], then_branch=branch, else_branch=branch),
        helper.make_node("Gather", ["scores", name], ["outside"]),
        helper.make_node("Add", ["inside", "outside"], ["y"]),
    ]
    stored = [numpy_helper.from_array(SCORES_V, "scores"), numpy_helper.from_array(np.array(True), "yes")]
    values = [
        helper.make_tensor_value_info(name, type_, ["N", "L"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "L"]),
    ]
    graph = helper.make_graph(nodes, "ids", values[:1], values[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def load(bench: Bench, folder: Path, dtype: str) -> Any:
    np.savez(folder / "a.npz", ids=IDS_NL.astype(dtype))
    data = bench.run(load_arrays, {"path": str(folder / "a.npz"), "inputs": ["ids"], "task": "unlabeled"})
    return bench.run(onnx_model, {"file": str(folder / "a.onnx")}, data=data)


@pytest.mark.parametrize(("type_", "dtype"), [(TensorProto.INT32, "int64"), (TensorProto.INT64, "int32")])
@pytest.mark.parametrize("name", ["ids", "serving_default_ids:0"])
def test_integers_are_cast_in_the_copy(bench: Bench, tmp_path: Path, type_: int, dtype: str, name: str) -> None:
    """TensorFlow's ids are int32."""
    write(tmp_path / "a.onnx", type_, name)
    file = load(bench, tmp_path, dtype)
    assert bench.notices == [
        f"a.onnx takes {name} as {'int32' if dtype == 'int64' else 'int64'}: the run's copy takes the data set's "
        f"{dtype}, and casts it"
    ]
    assert [str(spec) for spec in file.signature.inputs] == [f"ids (batch, 3) {dtype}"]
    with file.predictor(1) as predict:
        np.testing.assert_array_equal(predict({"ids": IDS_NL.astype(dtype)})["y"], 2 * SCORES_V[IDS_NL])


def test_integers_of_the_same_width_are_not(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path / "a.onnx", TensorProto.INT64, "ids")
    stored = (tmp_path / "a.onnx").read_bytes()
    assert load(bench, tmp_path, "int64").path.read_bytes() == stored
    assert bench.notices == []


def test_other_types_are_refused(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path / "a.onnx", TensorProto.INT64, "ids")
    with pytest.raises(StageError, match=r"^a.onnx: ids is int64, the data set's ids \(batch, 3\) float32 is not"):
        load(bench, tmp_path, "float32")
