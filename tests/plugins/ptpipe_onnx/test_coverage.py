from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe.events import LogLine, Notice
from ptpipe_onnx.coverage import coverage_of
from ptpipe_onnx.kernels import Kernels
from ptpipe_torch import Model, OnnxFile

from .conftest import Exported

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("cnn", "2 of 2 convolutions, 2 of 2 linear layers"),
        ("residual", "3 of 3 convolutions, 1 of 1 linear layers"),
        ("mobile", "3 of 3 convolutions, 1 of 1 linear layers"),
        ("rows", "5 of 5 linear layers"),
        ("attention", "4 of 4 linear layers, 2 of 2 matrix products"),
    ],
)
def test_all_layers_of_a_static_model(name: str, counts: str, backend: str, exported: Callable[..., Exported]) -> None:
    events = exported(name, backend).events
    assert events.metrics["integer_coverage"] == counts
    assert events.metrics["num_float_layers"] == 0
    assert not any("integer kernels" in event.text for event in events if isinstance(event, Notice)), "all is well"


def test_a_layer_that_was_left_float_is_named(run_export: Export, int8_model: Make, events) -> None:
    run_export(int8_model("cnn", "fbgemm", skip="2.0"))
    assert events.metrics["integer_coverage"] == "1 of 2 convolutions, 2 of 2 linear layers"
    logged = [event.text for event in events if isinstance(event, LogLine)]
    assert any("in float because they are float in the model: 2.0" in line for line in logged)
    assert not any("integer kernels" in event.text for event in events if isinstance(event, Notice)), "it was wanted"


def test_a_dynamic_model(run_export: Export, dynamic_model: Make, events) -> None:
    run_export(dynamic_model("cnn", "fbgemm", per_channel=True))
    assert events.metrics["integer_coverage"] == "0 of 2 convolutions, 2 of 2 linear layers"


def test_a_float_model_has_no_such_figures(exported: Callable[..., Exported]) -> None:
    assert "integer_coverage" not in exported("cnn").events.metrics


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("", ""),
        ("float input", "their input is float"),
        ("float output", "Relu reads their output in float"),
        ("transposed", "ONNX Runtime has no integer kernel for ConvTranspose of such inputs"),
    ],
)
def test_why_a_layer_is_float(change: str, reason: str, tmp_path: Path) -> None:
    arrays = {
        "s": np.array(0.1, np.float32),
        "z": np.array(3, np.uint8),
        "conv.weight": np.full((2, 2, 1, 1), 5, np.int8),
        "w_s": np.array(0.1, np.float32),
        "w_z": np.array(0, np.int8),
    }
    made = [
        helper.make_node("QuantizeLinear", ["images", "s", "z"], ["integers"]),
        helper.make_node("DequantizeLinear", ["integers", "s", "z"], ["x"]),
        helper.make_node("DequantizeLinear", ["conv.weight", "w_s", "w_z"], ["w"]),
        helper.make_node(
            "ConvTranspose" if change == "transposed" else "Conv",
            ["images" if change == "float input" else "x", "w"],
            ["y"],
            name="node_conv",
        ),
    ]
    if change == "float output":
        made += [helper.make_node("Relu", ["y"], ["r"]), helper.make_node("Sin", ["r"], ["logits"])]
    else:
        made += [
            helper.make_node("QuantizeLinear", ["y", "s", "z"], ["sums"]),
            helper.make_node("DequantizeLinear", ["sums", "s", "z"], ["logits"]),
        ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2, 3, 3]) for name in ("images", "logits")]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    path = tmp_path / "m.onnx"
    graph = helper.make_graph(made, "g", ends[:1], ends[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    coverage = coverage_of(path, Kernels.of(path, tmp_path), {})
    assert [(layer.name, layer.reason) for layer in coverage.layers] == [("conv", reason)]


@pytest.mark.parametrize(
    ("operands", "kind", "name"),
    [
        (("x", "w"), "linear layer", "block.w"),
        (("w", "x"), "linear layer", "block.w"),
        (("x", "x"), "matrix product", "node_einsum"),
    ],
)
def test_an_einsum_counts_as_what_it_multiplies(
    operands: tuple[str, str], kind: str, name: str, tmp_path: Path
) -> None:
    inputs = ["block.w" if operand == "w" else operand for operand in operands]
    made = helper.make_node("Einsum", inputs, ["y"], name="node_einsum", equation="ij,jk->ik")
    ends = [helper.make_tensor_value_info(of, TensorProto.FLOAT, [3, 3]) for of in ("x", "y")]
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "block.w")
    graph = helper.make_graph([made], "g", ends[:1], ends[1:], [weight] * ("w" in operands))
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    (layer,) = coverage_of(path, Kernels.of(path, tmp_path), {}).layers
    assert (layer.name, layer.kind, bool(layer.reason)) == (name, kind, True)
