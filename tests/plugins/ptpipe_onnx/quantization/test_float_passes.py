"""Operators that files spell out: written as one before the quantizer, or named to stay float."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from ptpipe_onnx.quantization.float_passes import float_parts, write_whole_operators
from ptpipe_onnx.quantization.nodes import name_nodes

from ..test_qdq_passes import Draft, types_of

Run = Callable[..., np.ndarray]
RNG = np.random.default_rng(2)
IMAGES = (RNG.normal(size=(2, 4, 6, 6)) * 3).astype(np.float32)
ROWS = (RNG.normal(size=(2, 5, 8)) * 2).astype(np.float32)


def number(draft: Draft, value: float, *shape: int) -> str:
    return draft.array(np.full(shape, value), np.float32)


def conv(draft: Draft, value: str, *, has_bias: bool = True) -> str:
    biases = [draft.array(RNG.normal(size=4), np.float32)] if has_bias else []
    weight = draft.array(RNG.normal(size=(4, 4, 3, 3)), np.float32)
    return draft.node("Conv", [value, weight, *biases], pads=[1, 1, 1, 1])


def hardswish(draft: Draft, x: str, form: str) -> str:
    clipped = draft.node("Clip", [draft.node("Add", [x, number(draft, 3)]), number(draft, 0.0), number(draft, 6.0)])
    match form:
        case "divided last":
            return draft.node("Div", [draft.node("Mul", [x, clipped]), number(draft, 6, 1)])
        case "divided first":
            return draft.node("Mul", [draft.node("Div", [clipped, number(draft, 6)]), x])
        case "hard sigmoid":
            return draft.node("Mul", [x, draft.node("HardSigmoid", [x], alpha=1 / 6, beta=0.5)])
    raise AssertionError(form)


def same_outputs(run_onnx: Run, before: ModelProto, after: ModelProto, x: np.ndarray) -> None:
    onnx.checker.check_model(after, full_check=True)
    expected = run_onnx(before.SerializeToString(), x)
    np.testing.assert_allclose(run_onnx(after.SerializeToString(), x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("form", ["divided last", "divided first", "hard sigmoid"])
def test_a_hardswish_is_one_operator(form: str, opset: int, run_onnx: Run) -> None:
    draft = Draft()
    model = draft.finished(conv(draft, hardswish(draft, conv(draft, "images"), form)))
    model.opset_import[0].version = opset
    after = write_whole_operators(model)
    types = types_of(after)
    assert types["HardSwish"] == 1 and not {"Add", "Clip", "Mul", "Div", "HardSigmoid"} & set(types)
    same_outputs(run_onnx, model, after, IMAGES)
    assert after.opset_import[0].version == 18


@pytest.mark.parametrize("has_bias", [True, False])
def test_numbers_behind_a_convolution_become_part_of_it(has_bias: bool, run_onnx: Run) -> None:
    draft = Draft()
    value = conv(draft, "images", has_bias=has_bias)
    value = draft.node("Mul", [number(draft, -0.7, 1), value])
    value = draft.node("Add", [value, number(draft, 0.3, 1, 1, 1, 1)])
    model = draft.finished(draft.node("Mul", [value, number(draft, 2.0)]))
    after = write_whole_operators(model)
    assert types_of(after) == {"Conv": 1, "Identity": 1}
    same_outputs(run_onnx, model, after, IMAGES)


def test_layers_keep_their_names_and_shared_weights_their_numbers(run_onnx: Run) -> None:
    draft = Draft()
    weight = draft.array(RNG.normal(size=(4, 4, 1, 1)), np.float32)
    first = draft.node("Mul", [draft.node("Conv", ["images", weight]), number(draft, 2.0)])
    alone = draft.array(RNG.normal(size=(4, 4, 1, 1)), np.float32)
    second = draft.node("Add", [draft.node("Conv", ["images", alone]), number(draft, 2.0)])
    model = draft.finished(draft.node("Sum", [first, second, draft.node("Conv", ["images", weight])]))
    for tensor, name in ((weight, "shared.weight"), (alone, "alone.weight")):
        stored = next(own for own in model.graph.initializer if own.name == tensor)
        stored.name = name
        for node in model.graph.node:
            for index, read in enumerate(node.input):
                node.input[index] = name if read == tensor else read
    after = write_whole_operators(model)
    same_outputs(run_onnx, model, after, IMAGES)
    names = [list(node.input[1:]) for node in after.graph.node if node.op_type == "Conv"]
    assert names == [["shared.weight.1", "shared.bias"], ["alone.weight", "alone.bias"], ["shared.weight"]]


@pytest.mark.parametrize("form", ["two readers", "two tensors", "a number for each column", "a further axis"])
def test_what_is_no_number_behind_a_convolution_stays(form: str, run_onnx: Run) -> None:
    draft = Draft()
    value = conv(draft, "images")
    match form:
        case "two readers":
            value = draft.node("Sub", [draft.node("Mul", [value, number(draft, 2.0)]), value])
        case "two tensors":
            value = draft.node("Add", [value, value])
        case "a further axis":
            value = draft.node("Mul", [value, number(draft, 2.0, 1, 1, 1, 1, 1)])
        case _:
            value = draft.node("Mul", [value, draft.array(np.arange(6), np.float32)])
    model = draft.finished(value)
    after = write_whole_operators(model)
    assert types_of(after) == types_of(model)
    same_outputs(run_onnx, model, after, IMAGES)


def test_a_layer_norm_is_one_operator(run_onnx: Run) -> None:
    draft = Draft()
    x = draft.node("Relu", ["images"])
    axes = draft.array([-1], np.int64)
    centred = draft.node("Sub", [x, draft.node("ReduceMean", [x, axes], keepdims=1)])
    squares = draft.node("Pow", [centred, number(draft, 2.0)])
    variance = draft.node("Add", [draft.node("ReduceMean", [squares, axes], keepdims=1), number(draft, 1e-5)])
    value = draft.node("Div", [centred, draft.node("Sqrt", [variance])])
    value = draft.node("Mul", [value, draft.array(RNG.normal(size=8), np.float32)])
    value = draft.node("Add", [value, draft.array(RNG.normal(size=8), np.float32)])
    model = draft.finished(value, ("N", 5, 8))
    after = write_whole_operators(model)
    name_nodes(after.graph)
    assert types_of(after) == {"Relu": 1, "LayerNormalization": 1, "Identity": 1}
    same_outputs(run_onnx, model, after, ROWS)
    assert float_parts(after) == [node.name for node in after.graph.node if node.op_type == "LayerNormalization"]


def gelu(draft: Draft, x: str, form: str) -> str:
    def times(value: str, factor: float) -> str:
        return draft.node("Mul", [value, number(draft, factor)])

    if form == "tanh":
        cube = draft.node("Pow", [x, number(draft, 3.0)])
        inner = draft.node("Add", [x, times(cube, 0.044715)])
        gate = draft.node("Tanh", [times(inner, math.sqrt(2 / math.pi))])
    else:
        gate = draft.node("Erf", [draft.node("Div", [x, number(draft, math.sqrt(2))])])
    total = draft.node("Add", [gate, number(draft, 1.0)])
    match form:
        case "x halved":
            return draft.node("Mul", [times(x, 0.5), total])
        case "total halved":
            return draft.node("Mul", [x, times(total, 0.5)])
    return times(draft.node("Mul", [x, total]), 0.5)


@pytest.mark.parametrize("form", ["x halved", "total halved", "product halved", "tanh"])
def test_all_parts_of_a_gelu_stay_float_and_nothing_else(form: str) -> None:
    draft = Draft()
    x = draft.node("Add", [draft.node("Mul", ["images", "images"]), "images"])  # not a part, though such operators are
    before = len(draft.nodes)
    value = gelu(draft, x, form)
    after = len(draft.nodes)
    model = draft.finished(draft.node("Add", [value, x]))
    name_nodes(model.graph)
    assert sorted(float_parts(model)) == sorted(node.name for node in model.graph.node[before:after])


@pytest.mark.parametrize("form", ["mean of squares", "norm", "no mean"])
def test_what_a_normalization_divides_by_stays_float(form: str) -> None:
    draft = Draft()
    x = draft.node("Mul", ["images", number(draft, 2.0)])
    axes = draft.array([-1], np.int64)
    first = len(draft.nodes)
    squares = draft.node("Mul", [x, x])
    match form:
        case "mean of squares":  # as JAX computes variances
            mean = draft.node("ReduceMean", [x, axes])
            mean_square = draft.node("Mul", [draft.node("ReduceSum", [squares, axes]), number(draft, 1 / 8)])
            variance = draft.node("Sub", [mean_square, draft.node("Mul", [mean, mean])])
            root = draft.node(
                "Sqrt", [draft.node("Add", [draft.node("Max", [variance, number(draft, 0)]), number(draft, 1e-6)])]
            )
            factor = draft.node("Mul", [draft.node("Reciprocal", [root]), draft.array(RNG.normal(size=8), np.float32)])
            value = draft.node("Mul", [x, factor])
        case "norm":
            value = draft.node("Div", [x, draft.node("Sqrt", [draft.node("ReduceSum", [squares, axes])])])
        case _:
            value = draft.node("Div", [x, draft.node("Sqrt", [squares])])
    last = len(draft.nodes)
    model = draft.finished(draft.node("Add", [value, x]), ("N", 5, 8))
    name_nodes(model.graph)
    expected = [node.name for node in model.graph.node[first:last]]
    if form == "mean of squares":  # the mean itself is not behind a square
        expected = [name for name in expected if not name.startswith("ReduceMean")]
    assert sorted(float_parts(model)) == ([] if form == "no mean" else sorted(expected))


@pytest.mark.parametrize("form", ["another tensor", "no product"])
def test_a_gate_of_something_else_is_not_a_gelu(form: str) -> None:
    draft = Draft()
    gate = draft.node("Add", [draft.node("Tanh", [draft.node("Mul", ["images", "images"])]), number(draft, 1.0)])
    other = draft.node("Relu", ["images"])
    model = draft.finished(draft.node("Mul", [gate, other]) if form == "another tensor" else gate)
    name_nodes(model.graph)
    assert float_parts(model) == []


@pytest.mark.parametrize(("shape", "is_part"), [((6,), True), ((1, 6), False), ((), False)])
def test_the_addition_of_a_products_bias_stays_float(shape: tuple[int, ...], is_part: bool) -> None:
    draft = Draft()
    product = draft.node("MatMul", ["images", draft.array(RNG.normal(size=(8, 6)), np.float32)])
    model = draft.finished(draft.node("Add", [number(draft, 1.0, *shape), product]), ("N", 5, 8))
    name_nodes(model.graph)
    assert float_parts(model) == ([model.graph.node[1].name] if is_part else [])
