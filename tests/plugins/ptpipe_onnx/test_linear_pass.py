"""Linear layers on sequences: hand-made graphs, run before and after without the runtime's own rewrites.

Shape legend: N samples, L tokens, R all rows, I inputs of a layer, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ptpipe.events import LogLine
from ptpipe_onnx import linear_pass
from ptpipe_onnx.coverage import coverage_of
from ptpipe_onnx.graph import producer, remove_unused
from ptpipe_onnx.linear_pass import use_convolutions, use_products

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


def applied(model: onnx.ModelProto) -> onnx.ModelProto:
    """The pass alone."""
    inferred = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    use_convolutions(inferred.graph)
    remove_unused(inferred)
    result = ir.serde.serialize_model(inferred)
    result.graph.ClearField("value_info")
    onnx.checker.check_model(result, full_check=True)
    return result


def layer_operators(model: onnx.ModelProto) -> dict[str, int]:
    """How many operators there are of which the pass writes or replaces."""
    operators = ("MatMul", "Add", "Gemm", "Conv", "Transpose", "Reshape", "Shape", "Concat")
    return {name: number for name, number in types_of(model).items() if name in operators and number}


def assert_one_integer_layer(model: onnx.ModelProto, operator: str, folder: Path) -> None:
    """Check that ONNX Runtime runs the kernel of the operator alone, and that reports call it a linear layer."""
    kernels = kernels_of(rewritten(model), folder)
    assert kernels.integer == {{"Gemm": "QGemm", "MatMul": "QLinearMatMul", "Conv": "QLinearConv"}[operator]: 1}
    assert not kernels.float
    (layer,) = coverage_of(folder / "m.onnx", kernels, {}).layers
    assert (layer.kind, layer.reason) == ("linear layer", "")


SHAPES: list[tuple[Sequence[int | str | None], str, dict[str, int]]] = [
    (("N", 6), "Gemm", {}),
    (("N", 3, 6), "Conv", {"Transpose": 2}),
    (("N", 2, 3, 6), "Conv", {"Transpose": 2}),
    (("N", "L", 6), "Conv", {"Transpose": 2}),
    ((None, None, 6), "Conv", {"Transpose": 2}),
    (("N", 2, 3, 2, 6), "Conv", {"Transpose": 2, "Reshape": 2}),
    (("N", "L", 3, 2, 6), "Conv", {"Transpose": 2, "Reshape": 2, "Shape": 1, "Concat": 1}),
]


@pytest.mark.parametrize("bias", [BIAS_O, None], ids=["bias", "no bias"])
@pytest.mark.parametrize(("shape", "operator", "added"), SHAPES)
def test_a_product_and_a_bias_are_one_layer(
    shape: Sequence[int | str | None],
    operator: str,
    added: dict[str, int],
    bias: np.ndarray | None,
    run_onnx: Run,
    tmp_path,
) -> None:
    if operator == "Gemm" and bias is None:
        operator = "MatMul"
    draft = Draft()
    value = linear(draft, draft.quantize("images", 0.05, 120), bias)
    model = draft.finished(draft.quantize(value, 0.1, 100), shape)
    alone = applied(model)
    assert layer_operators(alone) == {operator: 1, **added}
    given = [size if isinstance(size, int) else number for size, number in zip(shape, (4, 3, 2, 2, 6), strict=False)]
    for leading in ((given[0],), (1,), (0,))[: 2 if "Shape" in added else 3]:  # there all samples are one
        x = sequences(*leading, *given[1:-1], 6)
        before = run_onnx(model.SerializeToString(), x)
        np.testing.assert_allclose(run_onnx(alone.SerializeToString(), x), before, rtol=0, atol=1e-6)
        assert before.shape == (*leading, *given[1:-1], 5)

    written = ir.serde.deserialize_model(alone)
    assert use_products(written.graph) == (operator == "Conv")
    remove_unused(written)
    assert types_of(ir.serde.serialize_model(written))["Conv"] == 0
    undone = ir.serde.serialize_model(written).SerializeToString()
    np.testing.assert_array_equal(run_onnx(undone, x), run_onnx(model.SerializeToString(), x))

    assert_one_integer_layer(model, operator, tmp_path)


@pytest.mark.parametrize("bias", [BIAS_O, None], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("shape", "added"),
    [
        (("N", 6), {}),
        (("N", 3, 6), {"Reshape": 2}),
        ((3, "N", 6), {"Reshape": 2}),
        (("N", 2, 3, 6), {"Reshape": 2}),
        (("N", "L", 6), {"Reshape": 2, "Shape": 1, "Concat": 1}),
        ((None, None, 6), {"Reshape": 2, "Shape": 1, "Concat": 1}),
    ],
)
def test_of_many_inputs_a_layer_is_a_product_of_rows(
    shape: Sequence[int | str | None],
    added: dict[str, int],
    bias: np.ndarray | None,
    run_onnx: Run,
    tmp_path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_pass, "_WIDE", 6)
    draft = Draft()
    value = linear(draft, draft.quantize("images", 0.05, 120), bias)
    model = draft.finished(draft.quantize(value, 0.1, 100), shape)
    alone = applied(model)
    assert layer_operators(alone) == ({"MatMul": 1} if bias is None else {"Gemm": 1, **added})
    x = sequences(*(size if isinstance(size, int) else 4 for size in shape))
    before = run_onnx(model.SerializeToString(), x)
    np.testing.assert_allclose(run_onnx(alone.SerializeToString(), x), before, rtol=0, atol=1e-6)
    assert_one_integer_layer(model, "MatMul" if bias is None else "Gemm", tmp_path)


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


@pytest.mark.parametrize(
    ("shape", "shared"),
    [(("N", "L", 6), {"Transpose": 3}), (("N", "L", 2, 2, 6), {"Transpose": 3, "Reshape": 3, "Shape": 1, "Concat": 1})],
)
def test_layers_that_read_one_tensor_share_what_brings_it_into_form(
    shape: Sequence[int | str], shared: dict[str, int], run_onnx: Run, tmp_path
) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 120)
    first, second = (draft.quantize(linear(draft, value, BIAS_O * factor), 0.1, 100) for factor in (1, -1))
    total = draft.node("Add", [first, second])
    model = draft.finished(draft.quantize(total, 0.2, 128), shape)
    after = applied(model)
    types = types_of(after)
    assert {name: types[name] for name in ("Conv", *shared)} == {"Conv": 2, **shared}
    x = sequences(*(size if isinstance(size, int) else 3 for size in shape))
    before = run_onnx(model.SerializeToString(), x)
    np.testing.assert_allclose(run_onnx(after.SerializeToString(), x), before, rtol=0, atol=1e-6)
    assert kernels_of(rewritten(model), tmp_path).integer == {"QLinearConv": 2, "QLinearAdd": 1}


def test_a_layer_that_is_called_several_times_stores_its_weights_once(run_onnx: Run) -> None:
    draft = Draft()
    weight = draft.weight(WEIGHT_IO[:, [0, 1, 2, 3, 4, 0]], 0.01)
    value = draft.quantize("images", 0.05, 120)
    for _ in range(2):
        value = draft.quantize(draft.node("MatMul", [value, weight]), 0.05, 120)
    model = draft.finished(value, ("N", "L", 6))
    after = applied(model)
    assert types_of(after)["Conv"] == 2
    assert [
        array.dims for array in after.graph.initializer if array.data_type == onnx.TensorProto.INT8 and array.dims
    ] == [[6, 6, 1]]
    x = sequences(2, 5, 6)
    np.testing.assert_allclose(
        run_onnx(after.SerializeToString(), x), run_onnx(model.SerializeToString(), x), rtol=0, atol=1e-6
    )


SEQUENCE_FIRST: list[tuple[Sequence[int | str | None], Sequence[int], dict[str, int]]] = [
    (("N", 7, 6), (1, 0, 2), {"Reshape": 4}),
    ((1, 7, 6), (1, 0, 2), {"Reshape": 4}),
    (("N", "L", 6), (1, 0, 2), {"Reshape": 4, "Shape": 1, "Concat": 2}),
    (("N", 3, 2, 6), (1, 2, 0, 3), {"Reshape": 4}),
    (("N", 2, 3, 2, 6), (0, 1, 2, 3, 4), {"Reshape": 4}),
]


@pytest.mark.parametrize(("shape", "order", "added"), SEQUENCE_FIRST)
def test_positions_are_not_taken_for_samples(
    shape: Sequence[int | str | None], order: Sequence[int], added: dict[str, int], run_onnx: Run, tmp_path
) -> None:
    """Layers one behind the other, whose input has its samples along another axis than the first."""
    draft = Draft()
    value = draft.quantize(draft.node("Transpose", ["images"], perm=order), 0.05, 120)
    value = draft.quantize(linear(draft, value), 0.05, 100)
    weight = draft.weight(WEIGHT_IO.T, 0.01)
    value = draft.quantize(draft.node("MatMul", [value, weight]), 0.05, 120)
    model = draft.finished(draft.node("Transpose", [value], perm=np.argsort(order).tolist()), shape)
    after = applied(model)
    types = types_of(after)
    assert {name: types[name] for name in ("Conv", *added)} == {"Conv": 2, **added}
    inferred = onnx.shape_inference.infer_shapes(after, data_prop=True)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in inferred.graph.value_info}
    num_samples = {shapes[node.input[0]][0].dim_value for node in after.graph.node if node.op_type == "Conv"}
    assert num_samples == {1 if len(shape) < 5 else 0}  # of five axes, the first is the samples', of any number
    given = [size if isinstance(size, int) else 5 for size in shape]
    x = sequences(*given)
    before = run_onnx(model.SerializeToString(), x)
    np.testing.assert_allclose(run_onnx(after.SerializeToString(), x), before, rtol=0, atol=1e-6)
    assert kernels_of(rewritten(model), tmp_path).integer == {"QLinearConv": 2}


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
    coarse = next(array for array in integers if array.dtype == np.int8 and array.shape == (5, 6, 1))
    assert not coarse[3].any()
    np.testing.assert_array_equal(np.delete(coarse, 3, 0)[..., 0], np.delete(WEIGHT_IO.T, 3, 0))


@pytest.mark.parametrize("change", ["two readers", "a bias for each row", "scales for each row", "float"])
def test_what_is_no_such_layer_stays(change: str, run_onnx: Run) -> None:
    draft = Draft()
    value = "images" if change == "float" else draft.quantize("images", 0.05, 120)
    bias = RNG.normal(size=(4, 1)) if change == "a bias for each row" else BIAS_O
    if change == "scales for each row":
        product = draft.node("MatMul", [value, draft.weight(WEIGHT_IO, RNG.uniform(0.01, 0.02, 6), axis=0)])
        layer = draft.node("Add", [product, draft.array(BIAS_O, np.float32)])
    else:
        layer = linear(draft, value, bias)
    output = draft.quantize(layer, 0.1, 100)
    if change == "two readers":
        output = draft.node("Add", [output, layer])
    model = draft.finished(output, ("N", 4, 6))
    after = applied(model)
    assert types_of(after) == types_of(model)
    x = sequences(3, 4, 6)
    np.testing.assert_array_equal(
        run_onnx(after.SerializeToString(), x), run_onnx(model.SerializeToString(), x), strict=True
    )


@pytest.mark.parametrize("change", ["three positions", "float weights", "another order"])
def test_convolutions_of_other_files_that_are_no_linear_layers_stay(change: str) -> None:
    """As other quantizers write them, without the optional attribute `kernel_shape`."""
    draft = Draft()
    value = draft.quantize("images", 0.05, 120)
    value = draft.node("Transpose", [draft.quantize(value, 0.05, 120, dequantize=False)], perm=[0, 2, 1])
    grid = [draft.array(0.05, np.float32), draft.array(120, np.uint8)]
    floats = draft.node("DequantizeLinear", [value, *grid])
    weight_OI1 = np.repeat(WEIGHT_IO.T[..., None], 3 if change == "three positions" else 1, axis=2)
    integers = draft.weight(weight_OI1, 0.01)
    weight = draft.array(weight_OI1, np.float32) if change == "float weights" else integers
    value = draft.quantize(draft.node("Conv", [floats, weight]), 0.1, 100, dequantize=False)
    order = [1, 2, 0] if change == "another order" else [0, 2, 1]
    moved = draft.node("Transpose", [value], perm=order)
    model = draft.finished(draft.node("DequantizeLinear", [moved, *grid]), ("N", 4, 6))
    assert not use_products(ir.serde.deserialize_model(model).graph)


@pytest.mark.parametrize(("backend", "qat"), [("fbgemm", False), ("qnnpack", True)])
def test_an_export_of_linear_layers_on_sequences(backend: str, qat: bool, exported: Callable[..., Exported]) -> None:
    made = exported("rows", backend, qat=qat)
    file, events = made.file, made.events
    assert events.metrics["layers_identical"] == 5
    assert events.metrics["layers_merged"] == 0
    assert (events.metrics["num_int8_nodes"], events.metrics["num_float_nodes"]) == (5, 0)
    logged = [event.text for event in events if isinstance(event, LogLine)]
    assert any("3 QLinearConv, 2 QGemm" in line for line in logged), "one has many inputs, the last one reads matrices"
    assert not {node.op_type for node in onnx.load(file.path).graph.node} & {"Shape", "MatMul"}


@pytest.mark.parametrize(("backend", "qat"), [("fbgemm", True), ("qnnpack", False)])
def test_an_export_of_attention(backend: str, qat: bool, exported: Callable[..., Exported]) -> None:
    """Projections and products of activations run in integers; what moves their operands moves integers."""
    made = exported("attention", backend, qat=qat)
    file, events = made.file, made.events
    assert events.metrics["layers_identical"] == 4
    assert events.metrics["integer_coverage"] == "4 of 4 linear layers, 2 of 2 matrix products"
    logged = [event.text for event in events if isinstance(event, LogLine)]
    assert any("3 QLinearConv" in line and "2 QLinearMatMul" in line for line in logged)
    graph = ir.load(file.path).graph
    assert {producer(node.inputs[0]).op_type for node in graph if node.op_type == "MatMul"} == {"DequantizeLinear"}
    for node in graph:
        if node.op_type in ("Transpose", "Reshape"):
            allowed = ("QuantizeLinear", "Transpose", "Reshape", "Squeeze", "Flatten")  # the last one is a barrier
            assert producer(node.inputs[0]).op_type in allowed
