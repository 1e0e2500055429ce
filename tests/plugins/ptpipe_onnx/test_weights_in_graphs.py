"""How quantized weights get into a graph.

Shape legend: N samples, D inputs and K outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe import StageError
from ptpipe_onnx.dynamic_passes import quantize_linear_layers
from ptpipe_onnx.weights import store_weights
from ptpipe_torch.int8.layers import QuantizedWeight

RNG = np.random.default_rng(11)
IMAGES_ND = RNG.normal(size=(6, 5)).astype(np.float32)
INTEGERS_KD = RNG.integers(-127, 128, (3, 5)).astype(np.int8)
SCALES_K = np.array([0.1, 0.02, 0.3], np.float32)
PER_CHANNEL = QuantizedWeight(INTEGERS_KD, SCALES_K, np.zeros(3, np.int8))
PER_TENSOR = QuantizedWeight(INTEGERS_KD, np.float32(0.1), np.int8(4))
Run = Callable[..., np.ndarray]


def graph_with(*nodes: onnx.NodeProto) -> ir.Model:
    """A model of `images` and a float weight `w` of shape (3, 5)."""
    ends = [
        helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 5]),
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3]),
    ]
    weight = numpy_helper.from_array(np.zeros((3, 5), np.float32), "w")
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return ir.serde.deserialize_model(model)


def by_gemm() -> ir.Model:
    return graph_with(helper.make_node("Gemm", ["images", "w"], ["logits"], transB=1))


def by_transposing() -> ir.Model:
    return graph_with(
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["images", "wt"], ["logits"]),
    )


def finished(model: ir.Model) -> bytes:
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto.SerializeToString()


@pytest.mark.parametrize("make", [by_gemm, by_transposing])
@pytest.mark.parametrize("weight", [PER_CHANNEL, PER_TENSOR])
def test_stored_weights_stand_for_the_same_numbers(
    make: Callable[[], ir.Model], weight: QuantizedWeight, run_onnx: Run
) -> None:
    model = make()
    store_weights(model, {"w": weight})
    offsets_KD = INTEGERS_KD.astype(np.float32) - weight.zero_points.reshape(-1, 1)
    expected_NK = IMAGES_ND @ (offsets_KD * weight.scales.reshape(-1, 1)).T
    np.testing.assert_allclose(run_onnx(finished(model), IMAGES_ND), expected_NK, rtol=1e-4, atol=1e-4)
    stored = [value.const_value.numpy() for value in model.graph.initializers.values()]
    assert sorted(array.dtype.name for array in stored) == ["float32", "int8", "int8"]
    assert {array.shape for array in stored if array.dtype == np.float32} == {weight.scales.shape}


@pytest.mark.parametrize("make", [by_gemm, by_transposing])
@pytest.mark.parametrize("weight", [PER_CHANNEL, PER_TENSOR])
def test_dynamic_layers_are_near_the_float_product(
    make: Callable[[], ir.Model], weight: QuantizedWeight, run_onnx: Run
) -> None:
    model = make()
    quantize_linear_layers(model, {"w": weight})
    offsets_KD = INTEGERS_KD.astype(np.float32) - weight.zero_points.reshape(-1, 1)
    float_KD = offsets_KD * weight.scales.reshape(-1, 1)
    half_step = np.ptp(np.append(IMAGES_ND, 0)) / 255 / 2
    found_NK = run_onnx(finished(model), IMAGES_ND)
    limits_K = 1.02 * half_step * np.abs(float_KD).sum(axis=1)
    assert (np.abs(found_NK - IMAGES_ND @ float_KD.T) <= limits_K).all()
    assert not any(
        value.const_value.numpy().size == 15 and value.dtype == ir.DataType.FLOAT
        for value in model.graph.initializers.values()
    )


def test_a_weight_that_the_exporter_lost_is_named() -> None:
    for put in (store_weights, quantize_linear_layers):
        with pytest.raises(StageError, match=r"no weight blocks\.3\.weight: leave its layer float"):
            put(by_gemm(), {"blocks.3.weight": PER_CHANNEL})


def test_a_weight_that_is_more_than_a_factor_is_named() -> None:
    model = graph_with(
        helper.make_node("Mul", ["w", "w"], ["square"]),
        helper.make_node("Gemm", ["images", "square"], ["logits"], transB=1),
    )
    with pytest.raises(StageError, match="w is used by Mul"):
        quantize_linear_layers(model, {"w": PER_CHANNEL})


def test_a_layer_called_twice_shares_its_weight(run_onnx: Run) -> None:
    model = graph_with(
        helper.make_node("Gemm", ["images", "w"], ["once"], transB=1),
        helper.make_node("Gemm", ["images", "w"], ["again"], transB=1),
        helper.make_node("Add", ["once", "again"], ["logits"]),
    )
    store_weights(model, {"w": PER_CHANNEL})
    expected_NK = 2 * IMAGES_ND @ (INTEGERS_KD * SCALES_K[:, None]).T
    np.testing.assert_allclose(run_onnx(finished(model), IMAGES_ND), expected_NK, rtol=1e-4, atol=1e-4)
    assert len(model.graph.initializers) == 3
