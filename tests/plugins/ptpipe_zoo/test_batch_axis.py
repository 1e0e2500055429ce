"""Files whose samples don't lie along the first axis. Shape legend: N samples, L steps, H features."""

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
from ptpipe_torch import Data, OnnxFile
from ptpipe_zoo import onnx_model

pytest_plugins = ["ptpipe.testing"]

NODES: dict[str, list[Any]] = {
    "each": [helper.make_node("Tanh", ["x"], ["y"])],
    "sum over the first axis": [helper.make_node("CumSum", ["x", "first"], ["y"])],
    "sum backwards": [helper.make_node("CumSum", ["x", "first"], ["y"], reverse=1)],
    "statistics": [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0]),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ],
    "int8": [
        helper.make_node("CumSum", ["x", "first"], ["sum"]),
        helper.make_node("QuantizeLinear", ["sum", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"]),
    ],
    "dynamic": [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "own_scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "own_scale", "zero"], ["rounded"]),
        helper.make_node("LpNormalization", ["rounded"], ["y"]),
    ],
    "dynamic sum": [
        helper.make_node("CumSum", ["x", "first"], ["sum"]),
        helper.make_node("DynamicQuantizeLinear", ["sum"], ["q", "own_scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "own_scale", "zero"], ["y"]),
    ],
    "noise": [
        helper.make_node("RandomNormalLike", ["x"], ["noise"]),
        helper.make_node("Add", ["x", "noise"], ["y"]),
    ],
    "not finite": [helper.make_node("Log", ["x"], ["y"])],
    "state": [
        helper.make_node("Gather", ["state", "first"], ["hidden"], axis=0),
        helper.make_node("Add", ["x", "hidden"], ["y"]),
    ],
}
FLOAT = TensorProto.FLOAT


def write(path: Path, nodes: str, *inputs: tuple[str, list[Any]], output: list[Any]) -> None:
    stored = [
        numpy_helper.from_array(np.array(0), "first"),
        numpy_helper.from_array(np.array(0.1, np.float32), "scale"),
    ]
    values = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs]
    outputs = [helper.make_tensor_value_info("y", FLOAT, output)]
    graph = helper.make_graph(NODES[nodes], "net", values, outputs, stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def load(bench: Bench, tmp_path: Path) -> Any:
    """Load `a.onnx` for 12 samples of these shapes, every second of which is `factor` times as large."""

    def load(factor: float = 1, **shapes: tuple[int, ...]) -> OnnxFile:
        random = np.random.default_rng(0)
        columns = {name: random.normal(size=(12, *shape)).astype(np.float32) for name, shape in shapes.items()}
        for values in columns.values():
            values[::2] *= factor
        np.savez(tmp_path / "a.npz", **columns)
        options = {"path": str(tmp_path / "a.npz"), "inputs": list(columns), "task": "unlabeled"}
        data: Data = bench.run(load_arrays, options)
        return bench.run(onnx_model, {"file": str(tmp_path / "a.onnx")}, data=data)

    return load


TIME_MAJOR = ("x", ["L", "N", 4])


@pytest.mark.parametrize("nodes", ["sum over the first axis", "sum backwards", "statistics", "int8", "dynamic sum"])
@pytest.mark.parametrize("size", ["L", 2, 3])
def test_samples_that_depend_on_each_other_are_refused(load: Any, tmp_path: Path, nodes: str, size: Any) -> None:
    write(tmp_path / "a.onnx", nodes, ("x", [size, "N", 4]), output=[size, "N", 4])
    with pytest.raises(StageError, match=r"^a\.onnx: y of a sample differs by .* The first axis of each input and"):
        load(x=(3, 4))


@pytest.mark.parametrize("nodes", ["each", "dynamic", "noise", "not finite"])
def test_samples_that_do_not_are_taken(load: Any, tmp_path: Path, nodes: str) -> None:
    write(tmp_path / "a.onnx", nodes, ("x", ["N", "L", 4]), output=["N", "L", 4])
    for factor in (100, 0.01):
        assert load(factor, x=(3, 4)).signature.inputs


@pytest.mark.parametrize("nodes", ["sum over the first axis", "statistics"])
def test_samples_that_are_predicted_one_at_a_time_are_independent(load: Any, tmp_path: Path, nodes: str) -> None:
    write(tmp_path / "a.onnx", nodes, ("x", [1, "L", 4]), output=[1, "L", 4])
    load(x=(3, 4))


def test_a_state_whose_samples_are_on_its_second_axis(load: Any, tmp_path: Path) -> None:
    """As in files of speech detectors: without an error, states of two samples would be taken for two layers'."""
    for layers in (2, "layers"):
        write(tmp_path / "a.onnx", "state", ("x", ["N", 4]), ("state", [layers, "N", 4]), output=["N", 4])
        with pytest.raises(StageError, match=r"^a\.onnx: state has the batch \(N\) on axis 1, and not on the first"):
            load(x=(4,), state=(2, 4))
    write(tmp_path / "a.onnx", "state", ("x", ["N", 4]), ("state", [2, None, 4]), output=["N", 4])
    with pytest.raises(StageError, match=r"^a\.onnx has inputs and outputs of 2 samples and of any number: export it"):
        load(x=(4,), state=(2, 4))


def test_a_state_of_one_layer_is_right_for_one_sample_at_a_time(load: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.onnx", "state", ("x", ["N", 4]), ("state", [1, "N", 4]), output=["N", 4])
    x_NH, state_N1H = np.eye(3, 4, dtype=np.float32), np.ones((3, 1, 4), np.float32)
    with load(x=(4,), state=(1, 4)).predictor(1) as predict:
        np.testing.assert_array_equal(predict({"x": x_NH, "state": state_N1H})["y"], x_NH + 1)


def test_a_symbol_that_stands_for_any_size_is_no_batch(load: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.onnx", "each", ("x", ["?", "?", 4]), output=["?", "?", 4])
    load(x=(3, 4))
