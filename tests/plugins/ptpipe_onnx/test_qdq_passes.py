"""Rewrites of hand-made graphs: what they leave, and that the numbers stay, run without the runtime's own rewrites.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ptpipe_onnx.grid import Grid
from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.qdq_passes import output_steps, use_integer_kernels

IMAGES_NCHW = (np.random.default_rng(9).normal(size=(3, 4, 6, 6)) * 4).astype(np.float32)
WEIGHT = np.random.default_rng(1).integers(-127, 128, (4, 4, 3, 3))
Run = Callable[..., np.ndarray]


class Draft:
    """Writes a graph line by line."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: list[onnx.TensorProto] = []

    def node(self, op_type: str, inputs: Sequence[str], *, num_outputs: int = 1, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        outputs = [name, *(f"{name}_{i}" for i in range(1, num_outputs))]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, **attributes))
        return name

    def array(self, content: object, dtype: type) -> str:
        name = f"a{len(self.arrays)}"
        self.arrays.append(numpy_helper.from_array(np.array(content, dtype), name))
        return name

    def quantize(self, value: str, scale: float, zero_point: int, *, dequantize: bool = True) -> str:
        grid = [self.array(scale, np.float32), self.array(zero_point, np.uint8)]
        integers = self.node("QuantizeLinear", [value, *grid])
        return self.node("DequantizeLinear", [integers, *grid]) if dequantize else integers

    def weight(self, integers: np.ndarray, scales: object, axis: int = 0) -> str:
        scale = self.array(scales, np.float32)
        zero_point = self.array(np.zeros(np.shape(scales)), np.int8)
        return self.node("DequantizeLinear", [self.array(integers, np.int8), scale, zero_point], axis=axis)

    def finished(self, output: str, shape: Sequence[int | str | None] = ("N", 4, 6, 6)) -> onnx.ModelProto:
        self.node("Identity", [output])
        self.nodes[-1].output[0] = "logits"
        ends = [
            helper.make_tensor_value_info("images", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, None),
        ]
        graph = helper.make_graph(self.nodes, "g", ends[:1], ends[1:], self.arrays)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    inferred = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    use_integer_kernels(inferred)
    for node in inferred.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    result = ir.serde.serialize_model(inferred)
    onnx.checker.check_model(result, full_check=True)
    return result


def types_of(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def conv(draft: Draft, value: str, bias: np.ndarray | None = None) -> str:
    weight = draft.weight(WEIGHT, np.full(4, 0.01))
    biases = [] if bias is None else [draft.array(bias, np.float32)]
    return draft.node("Conv", [value, weight, *biases], pads=[1, 1, 1, 1])


def check_same(model: onnx.ModelProto, run_onnx: Run, atol: float = 0) -> onnx.ModelProto:
    after = rewritten(model)
    before = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    assert np.ptp(before) > 0
    np.testing.assert_allclose(run_onnx(after.SerializeToString(), IMAGES_NCHW), before, rtol=0, atol=atol)
    return after


@settings(deadline=None, max_examples=60)
@given(
    scale=st.floats(0.01, 0.2),
    zero_point=st.integers(0, 255),
    low=st.floats(-8, 4),
    width=st.floats(0, 12),
    behind_a_conv=st.booleans(),
    is_relu=st.booleans(),
)
def test_a_clip_moves_behind_its_rounding(
    run_onnx: Run, scale: float, zero_point: int, low: float, width: float, behind_a_conv: bool, is_relu: bool
) -> None:
    draft = Draft()
    value = draft.quantize("images", scale, zero_point)
    if behind_a_conv:
        value = conv(draft, value)
    if is_relu:
        value = draft.node("Relu", [value])
    else:
        ends = [draft.array(end, np.float32) for end in (low, low + width)]
        value = draft.node("Clip", [value, *ends])
    model = draft.finished(draft.quantize(value, scale, zero_point))
    after = rewritten(model)
    before = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW), before)
    types = types_of(after)
    assert types["Relu"] == 0
    assert types["QuantizeLinear"] == 1 + behind_a_conv
    grid = Grid(np.float32(scale), zero_point, np.dtype(np.uint8))
    bounds = (grid.integer(0), 255) if is_relu else (grid.integer(low), grid.integer(low + width))
    assert types["Clip"] == (bounds != (0, 255))
    for node in after.graph.node:
        if node.op_type == "Clip":
            found = {array.name: numpy_helper.to_array(array) for array in after.graph.initializer}
            assert tuple(int(found[name]) for name in node.input[1:]) == bounds
            assert found[node.input[1]].dtype == np.uint8


@given(value=st.floats(-1e4, 1e4, width=32), scale=st.floats(2**-10, 8, width=32), zero_point=st.integers(-128, 127))
def test_a_grid_rounds_as_the_operator_does(value: float, scale: float, zero_point: int) -> None:
    from onnx.reference import ReferenceEvaluator

    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xs"]
    zero = helper.make_tensor_value_info("z", TensorProto.INT8, None)
    out = helper.make_tensor_value_info("y", TensorProto.INT8, None)
    model = helper.make_model(
        helper.make_graph([node], "q", [*ends, zero], [out]), opset_imports=[helper.make_opsetid("", 18)]
    )
    feeds = {"x": np.array([value], np.float32), "s": np.float32(scale), "z": np.int8(zero_point)}
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    assert Grid(np.float32(scale), zero_point, np.dtype(np.int8)).integer(value) == expected[0]


def test_a_relu_before_a_grid_from_zero_is_no_node_at_all(run_onnx: Run) -> None:
    draft = Draft()
    value = conv(draft, draft.quantize("images", 0.05, 128), bias=np.zeros(4))
    value = draft.quantize(draft.node("Relu", [value]), 0.2, 0)
    types = types_of(check_same(draft.finished(value), run_onnx))
    assert types["Relu"] == types["Clip"] == 0


def test_pools_and_reshapes_move_integers(run_onnx: Run, tmp_path) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 100)
    value = draft.quantize(draft.node("MaxPool", [value], kernel_shape=[2, 2], strides=[2, 2]), 0.05, 100)
    value = draft.quantize(draft.node("Transpose", [value], perm=[0, 2, 3, 1]), 0.05, 100)
    value = draft.quantize(draft.node("Flatten", [value], axis=1), 0.05, 100)
    after = check_same(draft.finished(value), run_onnx)
    assert [node.op_type for node in after.graph.node if node.op_type not in ("Identity",)] == [
        "QuantizeLinear",
        "MaxPool",
        "Transpose",
        "Flatten",
        "DequantizeLinear",
    ]
    kernels = kernels_of(after, tmp_path)
    assert (kernels.integer.total(), kernels.float.total()) == (1, 0)


def test_what_changes_its_grid_is_rounded_again(run_onnx: Run) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 100)
    value = draft.quantize(draft.node("MaxPool", [value], kernel_shape=[2, 2]), 0.07, 90)
    assert types_of(check_same(draft.finished(value), run_onnx))["QuantizeLinear"] == 2


def test_a_dropout_is_not_rounded_again(run_onnx: Run) -> None:
    draft = Draft()
    once = draft.quantize("images", 0.05, 100)
    twice = draft.finished(draft.quantize(once, 0.11, 3))
    after = rewritten(twice)
    assert types_of(after)["QuantizeLinear"] == 1
    expected = run_onnx(draft_of_one_quantization().SerializeToString(), IMAGES_NCHW)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), IMAGES_NCHW), expected)


def draft_of_one_quantization() -> onnx.ModelProto:
    draft = Draft()
    return draft.finished(draft.quantize("images", 0.05, 100))


@pytest.mark.parametrize("scales", [(0.05, 0.05), (0.05, 0.06)])
def test_concatenation(run_onnx: Run, scales: tuple[float, float]) -> None:
    draft = Draft()
    parts = [draft.quantize("images", scale, 100) for scale in scales]
    value = draft.quantize(draft.node("Concat", parts, axis=1), 0.05, 100)
    types = types_of(check_same(draft.finished(value), run_onnx))
    assert types["DequantizeLinear"] == (1 if len(set(scales)) == 1 else 3)


def test_splitting(run_onnx: Run) -> None:
    draft = Draft()
    parts = [draft.quantize(half, 0.05, 100) for half in halves(draft, draft.quantize("images", 0.05, 100))]
    value = draft.quantize(draft.node("Concat", parts[::-1], axis=1), 0.05, 100)
    assert types_of(check_same(draft.finished(value), run_onnx)) == Counter(
        {"QuantizeLinear": 1, "Split": 1, "Concat": 1, "DequantizeLinear": 1, "Identity": 1}
    )


def halves(draft: Draft, value: str) -> tuple[str, str]:
    first = draft.node("Split", [value], num_outputs=2, axis=1)
    draft.nodes[-1].attribute.append(helper.make_attribute("num_outputs", 2))
    return first, f"{first}_1"


def kernels_of(model: onnx.ModelProto, folder: Path) -> Kernels:
    onnx.save(model, folder / "m.onnx")
    return Kernels.of(folder / "m.onnx", folder)


def test_a_half_on_another_grid_is_rounded_by_the_concatenation(run_onnx: Run, tmp_path: Path) -> None:
    """A unit of shufflenet: one half passes, the other is convolved, both share the grid of the result."""
    draft = Draft()
    first, second = halves(draft, draft.quantize("images", 0.05, 100))
    passed = draft.quantize(first, 0.06, 90)
    doubled = draft.quantize(draft.node("Add", [second, second]), 0.06, 90)
    model = draft.finished(draft.quantize(draft.node("Concat", [passed, doubled], axis=1), 0.06, 90))
    after = check_same(model, run_onnx)
    types = types_of(after)
    assert (types["QuantizeLinear"], types["DequantizeLinear"]) == (3, 4)
    (split,) = (node for node in after.graph.node if node.op_type == "Split")
    assert split.input[0] == "v0", "integers"
    kernels = kernels_of(after, tmp_path)
    assert kernels.integer == {"QLinearConcat": 1, "QLinearAdd": 1}
    assert not kernels.float


def test_a_rounded_half_that_others_read_too_is_rounded_once(run_onnx: Run) -> None:
    draft = Draft()
    first, second = halves(draft, draft.quantize("images", 0.05, 100))
    passed, other = (draft.quantize(value, 0.06, 90) for value in (first, second))
    both = draft.quantize(draft.node("Concat", [passed, other], axis=1), 0.06, 90)
    model = draft.finished(draft.node("Concat", [both, passed], axis=1))
    types = types_of(check_same(model, run_onnx))
    assert (types["QuantizeLinear"], types["Concat"]) == (3, 2)


def test_operands_of_a_product_are_moved_as_integers(run_onnx: Run, tmp_path: Path) -> None:
    """As in attention: what no observer stands behind (here the transposition) comes between DQ and MatMul."""
    draft = Draft()
    value = draft.quantize("images", 0.05, 100)
    first, second = halves(draft, value)
    key = draft.node("Transpose", [draft.node("Reshape", [second, draft.array([0, 2, 3, 12], np.int64)])])
    draft.nodes[-1].attribute.append(helper.make_attribute("perm", [0, 1, 3, 2]))
    query = draft.node("Reshape", [first, draft.array([0, 2, 3, 12], np.int64)])
    model = draft.finished(draft.quantize(draft.node("MatMul", [query, key]), 3.0, 20))
    after = check_same(model, run_onnx)
    order = [node.op_type for node in after.graph.node]
    assert order.count("DequantizeLinear") == 3
    assert max(index for index, name in enumerate(order) if name in ("Reshape", "Transpose")) < order.index("MatMul")
    assert all(
        node.input[0].startswith("v0") for node in after.graph.node if node.op_type in ("Split", "Reshape", "Transpose")
    ), "named after the tensor whose grid they have"
    kernels = kernels_of(after, tmp_path)
    assert (kernels.integer, kernels.float.total()) == ({"QLinearMatMul": 1}, 0)


@pytest.mark.parametrize(("axes", "keepdims"), [((2, 3), 1), ((-1, -2), 0)])
def test_the_mean_over_an_image_is_a_pool(run_onnx: Run, axes: tuple[int, int], keepdims: int, tmp_path) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 100)
    value = draft.node("ReduceMean", [value, draft.array(axes, np.int64)], keepdims=keepdims)
    after = check_same(draft.finished(draft.quantize(value, 0.05, 100)), run_onnx)
    assert types_of(after)["ReduceMean"] == 0
    assert kernels_of(after, tmp_path).integer == Counter({"QLinearGlobalAveragePool": 1})


def test_the_mean_over_channels_stays(run_onnx: Run) -> None:
    draft = Draft()
    value = draft.node("ReduceMean", [draft.quantize("images", 0.05, 100), draft.array((1,), np.int64)])
    assert types_of(check_same(draft.finished(draft.quantize(value, 0.05, 100)), run_onnx))["ReduceMean"] == 1


def test_biases_become_int32_on_the_grid_of_the_sums(run_onnx: Run) -> None:
    bias = np.random.default_rng(2).normal(size=4) * 3
    draft = Draft()
    value = conv(draft, draft.quantize("images", 0.05, 128), bias=bias)
    model = draft.finished(draft.quantize(value, 0.4, 120))
    after = check_same(model, run_onnx, atol=0.401)  # a tie may fall to the other side: one step
    before, now = (run_onnx(each.SerializeToString(), IMAGES_NCHW) for each in (model, after))
    assert np.mean(before != now) < 0.002
    found = {array.name: numpy_helper.to_array(array) for array in after.graph.initializer}
    ((integers, scales),) = (
        (found[node.input[0]], found[node.input[1]])
        for node in after.graph.node
        if node.op_type == "DequantizeLinear" and found.get(node.input[0], np.empty(0)).dtype == np.int32
    )
    np.testing.assert_allclose(scales, 0.05 * 0.01, rtol=1e-6)
    np.testing.assert_array_equal(integers, np.rint(bias / (0.05 * 0.01)))


def test_a_channel_without_weights_keeps_its_bias(run_onnx: Run) -> None:
    """Its scale is next to nothing, and the bias in units of it beyond int32."""
    draft = Draft()
    weight = WEIGHT.copy()
    weight[2] = 0
    weight[3, 0, 0, 0] = 90
    scales = np.array([0.01, 0.01, 1e-7, 1e-12])
    value = draft.quantize("images", 0.05, 128)
    biases = draft.array([1.5, -2.0, 7.0, -30.0], np.float32)
    value = draft.node("Conv", [value, draft.weight(weight, scales), biases], pads=[1, 1, 1, 1])
    after = check_same(draft.finished(draft.quantize(value, 0.4, 120)), run_onnx, atol=0.401)
    logits = run_onnx(after.SerializeToString(), IMAGES_NCHW)
    np.testing.assert_allclose(logits[:, 2], 7.0, atol=0.2)
    np.testing.assert_allclose(logits[:, 3], -30.0, atol=0.2)
    largest = max(
        np.abs(numpy_helper.to_array(array).astype(np.int64)).max()
        for array in after.graph.initializer
        if array.data_type == TensorProto.INT32
    )
    assert 2**28 < largest <= 2**30


def test_the_steps_of_the_outputs() -> None:
    draft = Draft()
    model = draft.finished(draft.quantize("images", 0.25, 7))
    del model.graph.node[-1]
    model.graph.node[-1].output[0] = "logits"
    assert output_steps(ir.serde.deserialize_model(model).graph) == {"logits": 0.25}
    assert output_steps(ir.serde.deserialize_model(Draft().finished("images")).graph) == {}


def lookups(num_readers: int) -> onnx.ModelProto:
    draft = Draft()
    table = draft.array(np.random.default_rng(2).normal(size=(9, 5)) * 3, np.float32)
    row = draft.node(
        "Cast", [draft.node("Clip", ["images", draft.array(0, np.float32), draft.array(8, np.float32)])], to=7
    )
    values = [draft.quantize(draft.node("Gather", [table, row]), 0.04, 130) for _ in range(num_readers)]
    return draft.finished(draft.node("Sum", values), ("N", 3))


def test_a_table_whose_rows_are_rounded_is_stored_as_integers(run_onnx: Run) -> None:
    model = lookups(1)
    after = rewritten(model)
    assert types_of(after)["QuantizeLinear"] == 0
    (table,) = (array for array in after.graph.initializer if list(array.dims) == [9, 5])
    assert table.data_type == TensorProto.UINT8
    rows = np.array([[0, 1, 2], [8, 8, 5]], np.float32)
    before = run_onnx(model.SerializeToString(), rows)
    assert before.shape == (2, 3, 5) and np.ptp(before) > 5
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), rows), before)


def test_a_table_that_several_operators_read_stays_float() -> None:
    after = rewritten(lookups(2))
    assert [array.data_type for array in after.graph.initializer if list(array.dims) == [9, 5]] == [TensorProto.FLOAT]
