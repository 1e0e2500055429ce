"""Linear layers on sequences: hand-made graphs, run before and after without the runtime's own rewrites.

Shape legend: N samples, L tokens, R all rows, I inputs of a layer, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ptpipe.events import LogLine
from ptpipe_onnx.coverage import coverage_of
from ptpipe_onnx.gemm_pass import use_gemm
from ptpipe_onnx.graph import producer, remove_unused

from .conftest import Exported
from .test_qdq_passes import Draft, kernels_of, rewritten, types_of

Run = Callable[..., np.ndarray]
RNG = np.random.default_rng(4)
WEIGHT_IO = RNG.integers(-127, 128, (6, 5))
SCALES_O = RNG.uniform(0.002, 0.02, 5)
BIAS_O = RNG.normal(size=5) * 3


def linear(draft: Draft, value: str, bias: np.ndarray | None = BIAS_O, scales: object = SCALES_O) -> str:
    product = draft.node("MatMul", [value, draft.weight(WEIGHT_IO, scales, axis=1)])
    return product if bias is None else draft.node("Add", [draft.array(bias, np.float32), product])


def sequences(*shape: int) -> np.ndarray:
    return (np.random.default_rng(8).normal(size=shape) * 3).astype(np.float32)


def with_gemm(model: onnx.ModelProto) -> onnx.ModelProto:
    """The pass alone."""
    inferred = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    use_gemm(inferred.graph)
    remove_unused(inferred)
    result = ir.serde.serialize_model(inferred)
    result.graph.ClearField("value_info")
    onnx.checker.check_model(result, full_check=True)
    return result


SHAPES: list[tuple[Sequence[int | str | None], dict[str, int]]] = [
    (("N", 6), {}),
    (("N", 3, 6), {"Reshape": 2}),
    (("N", 2, 3, 6), {"Reshape": 2}),
    (("N", "L", 6), {"Reshape": 2, "Shape": 1, "Concat": 1}),
    ((None, None, 6), {"Reshape": 2, "Shape": 1, "Concat": 1}),
]


@pytest.mark.parametrize(("shape", "added"), SHAPES)
def test_a_product_and_a_bias_are_one_layer(
    shape: Sequence[int | str | None], added: dict[str, int], run_onnx: Run, tmp_path
) -> None:
    draft = Draft()
    value = linear(draft, draft.quantize("images", 0.05, 120))
    model = draft.finished(draft.quantize(value, 0.1, 100), shape)
    alone = with_gemm(model)
    types = types_of(alone)
    assert {name: types[name] for name in ("MatMul", "Add", "Gemm", *added)} == {
        "MatMul": 0,
        "Add": 0,
        "Gemm": 1,
        **added,
    }
    given = [size if isinstance(size, int) else number for size, number in zip(shape, (4, 3, 2, 6), strict=False)]
    for leading in ((given[0],), (1,), (0,)):
        x = sequences(*leading, *given[1:])
        before = run_onnx(model.SerializeToString(), x)
        np.testing.assert_allclose(run_onnx(alone.SerializeToString(), x), before, rtol=0, atol=1e-6)
        assert before.shape == (*leading, *given[1:-1], 5)

    kernels = kernels_of(rewritten(model), tmp_path)
    assert kernels.integer == {"QGemm": 1}
    assert not kernels.float
    (layer,) = coverage_of(tmp_path / "m.onnx", kernels, {}).layers
    assert (layer.kind, layer.reason) == ("linear layer", "")


def test_the_bias_is_int32_and_the_result_what_float64_gives(run_onnx: Run) -> None:
    draft = Draft()
    value = linear(draft, draft.quantize("images", 0.05, 120))
    after = rewritten(draft.finished(draft.quantize(value, 0.1, 100), ("N", "L", 6)))
    x_NLI = sequences(5, 7, 6)
    integers_NLI = np.clip(np.rint(x_NLI / np.float32(0.05)) + 120, 0, 255) - 120
    scales_O = np.float32(0.05) * SCALES_O.astype(np.float32)
    sums_NLO = integers_NLI @ WEIGHT_IO + np.rint(BIAS_O.astype(np.float32).astype(np.float64) / scales_O)
    steps_NLO = np.clip(np.rint(sums_NLO * scales_O / np.float32(0.1)) + 100, 0, 255) - 100
    for optimize in (False, True):
        found_NLO = run_onnx(after.SerializeToString(), x_NLI, optimize=optimize)
        np.testing.assert_allclose(found_NLO / np.float32(0.1), steps_NLO, rtol=0, atol=1e-4)
    biases = [
        numpy_helper.to_array(array) for array in after.graph.initializer if array.data_type == onnx.TensorProto.INT32
    ]
    np.testing.assert_array_equal(biases, [np.rint(BIAS_O.astype(np.float32).astype(np.float64) / scales_O)])


def test_layers_that_read_one_tensor_share_its_rows_and_all_share_a_shape(run_onnx: Run, tmp_path) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 120)
    first, second = (draft.quantize(linear(draft, value, BIAS_O * factor), 0.1, 100) for factor in (1, -1))
    total = draft.node("Add", [first, second])
    model = draft.finished(draft.quantize(total, 0.2, 128), ("N", "L", 6))
    after = with_gemm(model)
    types = types_of(after)
    assert (types["Gemm"], types["Reshape"], types["Shape"], types["Concat"]) == (2, 3, 1, 1)
    x = sequences(2, 9, 6)
    before = run_onnx(model.SerializeToString(), x)
    np.testing.assert_allclose(run_onnx(after.SerializeToString(), x), before, rtol=0, atol=1e-6)
    assert kernels_of(rewritten(model), tmp_path).integer == {"QGemm": 2, "QLinearAdd": 1}


def test_a_channel_without_weights_keeps_its_bias(run_onnx: Run) -> None:
    """The weights are stored by column here: a scale belongs to one."""
    draft = Draft()
    scales_O = SCALES_O.copy()
    scales_O[3] = 1e-12
    value = linear(draft, draft.quantize("images", 0.05, 120), BIAS_O + 7, scales_O)
    after = rewritten(draft.finished(draft.quantize(value, 0.2, 10), ("N", "L", 6)))
    found_NLO = run_onnx(after.SerializeToString(), sequences(2, 4, 6))
    np.testing.assert_allclose(found_NLO[..., 3], BIAS_O[3] + 7, atol=0.11)
    integers = [numpy_helper.to_array(array) for array in after.graph.initializer if array.name.startswith("a")]
    coarse = next(array for array in integers if array.dtype == np.int8 and array.shape == (6, 5))
    assert not coarse[:, 3].any()
    np.testing.assert_array_equal(np.delete(coarse, 3, 1), np.delete(WEIGHT_IO, 3, 1))


@pytest.mark.parametrize("change", ["no bias", "two readers", "a bias for each row", "scales for each row", "float"])
def test_what_is_no_such_layer_stays(change: str, run_onnx: Run) -> None:
    draft = Draft()
    value = "images" if change == "float" else draft.quantize("images", 0.05, 120)
    bias = {"no bias": None, "a bias for each row": RNG.normal(size=(4, 1))}.get(change, BIAS_O)
    if change == "scales for each row":
        product = draft.node("MatMul", [value, draft.weight(WEIGHT_IO, RNG.uniform(0.01, 0.02, 6), axis=0)])
        layer = draft.node("Add", [product, draft.array(BIAS_O, np.float32)])
    else:
        layer = linear(draft, value, bias)
    output = draft.quantize(layer, 0.1, 100)
    if change == "two readers":
        output = draft.node("Add", [output, layer])
    model = draft.finished(output, ("N", 4, 6))
    after = with_gemm(model)
    assert types_of(after) == types_of(model)
    x = sequences(3, 4, 6)
    np.testing.assert_array_equal(
        run_onnx(after.SerializeToString(), x), run_onnx(model.SerializeToString(), x), strict=True
    )


@pytest.mark.parametrize(("backend", "qat"), [("fbgemm", False), ("qnnpack", True)])
def test_an_export_of_linear_layers_on_sequences(backend: str, qat: bool, exported: Callable[..., Exported]) -> None:
    made = exported("rows", backend, qat=qat)
    file, events = made.file, made.events
    assert events.metrics["layers_identical"] == 3
    assert events.metrics["layers_merged"] == 0
    assert (events.metrics["num_int8_nodes"], events.metrics["num_float_nodes"]) == (3, 0)
    logged = [event.text for event in events if isinstance(event, LogLine)]
    assert any("2 QGemm" in line and "1 QLinearMatMul" in line for line in logged), "one layer has no bias"
    by_type = {node.op_type: node for node in onnx.load(file.path).graph.node}
    assert "Shape" not in by_type, "one symbolic axis alone"


@pytest.mark.parametrize(("backend", "qat"), [("fbgemm", True), ("qnnpack", False)])
def test_an_export_of_attention(backend: str, qat: bool, exported: Callable[..., Exported]) -> None:
    """Projections and products of activations run in integers; what moves their operands moves integers."""
    made = exported("attention", backend, qat=qat)
    file, events = made.file, made.events
    assert events.metrics["layers_identical"] == 4
    assert events.metrics["integer_coverage"] == "4 of 4 linear layers, 2 of 2 matrix products"
    logged = [event.text for event in events if isinstance(event, LogLine)]
    assert any("4 QGemm" in line and "2 QLinearMatMul" in line for line in logged)
    graph = ir.load(file.path).graph
    assert {producer(node.inputs[0]).op_type for node in graph if node.op_type == "MatMul"} == {"DequantizeLinear"}
    for node in graph:
        if node.op_type in ("Transpose", "Reshape"):
            assert producer(node.inputs[0]).op_type in ("QuantizeLinear", "Transpose", "Reshape", "Squeeze")
