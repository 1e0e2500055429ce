"""Shape legend: O outputs, I input channels, H height, W width of a kernel, K the reduction axis."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe.events import Notice
from ptpipe_onnx.saturation import pair_extremes, saturation_of
from ptpipe_torch import Model, OnnxFile
from ptpipe_torch.model.exact_session import may_saturate

from .conftest import Exported

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]


def extremes_of_all_inputs(weights_K: list[int], values: tuple[int, ...]) -> tuple[int, int]:
    """Add pairs as the kernel does, for every input of these values."""
    padded = [*weights_K, 0]
    sums = [
        [x * padded[k] + y * padded[k + 1] for x, y in product(values, repeat=2)] for k in range(0, len(weights_K), 2)
    ]
    return min(map(min, sums)), max(map(max, sums))


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_no_input_exceeds_the_bound_and_one_reaches_it(length: int) -> None:
    rng = np.random.default_rng(length)
    for _ in range(50):
        weights_OK = rng.integers(-128, 128, (3, length)).astype(np.int8)
        rows = [extremes_of_all_inputs(row.tolist(), (0, 1, 100, 255)) for row in weights_OK]
        expected = min(low for low, _ in rows), max(high for _, high in rows)
        assert tuple(255 * bound for bound in pair_extremes(weights_OK)) == expected


def graph_of(op_type: str, weights: np.ndarray, **attributes: object) -> ir.Graph:
    """DequantizeLinear in front of an operator with int8 weights, and QuantizeLinear behind it."""
    arrays = {"s": np.array(0.1, np.float32), "z": np.array(0, np.uint8), "layer.weight": weights}
    arrays |= {"w_s": np.array(0.1, np.float32), "w_z": np.array(0, np.int8)}
    made = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["tensor"]),
        helper.make_node("DequantizeLinear", ["tensor", "s", "z"], ["x_"]),
        helper.make_node("DequantizeLinear", ["layer.weight", "w_s", "w_z"], ["w_"]),
        helper.make_node(op_type, ["x_", "w_"], ["y"], name="product", **attributes),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(made, "g", ends[:1], ends[1:], initializers)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])).graph


def bound(op_type: str, weights: np.ndarray, **attributes: object) -> tuple[int, int] | None:
    found = saturation_of(graph_of(op_type, weights.astype(np.int8), **attributes), {}).layers
    return (found[0].low, found[0].high) if found else None


def test_neighbors_are_channels_of_one_position_of_the_kernel() -> None:
    weights_OIHW = np.zeros((1, 2, 1, 2))
    weights_OIHW[0, :, 0, 0] = 100, -90
    weights_OIHW[0, :, 0, 1] = 80, 50
    assert bound("Conv", weights_OIHW) == (-90 * 255, 130 * 255)


def test_an_odd_number_of_channels_pairs_over_positions() -> None:
    weights_OIHW = np.arange(1, 7).reshape(1, 2, 3).transpose(0, 2, 1)[..., None]  # in the order of the kernel: 1 ... 6
    assert bound("Conv", weights_OIHW) == (0, 11 * 255)


@pytest.mark.parametrize("op_type", ["Gemm", "MatMul"])
def test_neighbors_are_inputs_of_a_linear_layer(op_type: str) -> None:
    weights_OK = np.array([[60, 60, -10, -20], [1, -2, 3, -4]])
    attributes = {"transB": 1} if op_type == "Gemm" else {}
    assert bound(op_type, weights_OK if attributes else weights_OK.T, **attributes) == (-30 * 255, 120 * 255)


def test_depthwise_kernels_do_not_saturate() -> None:
    assert bound("Conv", np.full((4, 1, 3, 3), 127), group=4) == (0, 0)
    assert bound("Conv", np.full((4, 2, 3, 3), 127), group=2) == (0, 254 * 255)


@pytest.mark.parametrize(("largest", "saturates"), [(127, True), (65, True), (64, False)])
def test_seven_bits_of_weights_suffice(largest: int, saturates: bool) -> None:
    (layer,) = saturation_of(graph_of("MatMul", np.full((4, 1), largest, np.int8)), {}).layers
    assert layer.saturates is saturates


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_an_export_says_which_layers_can_saturate(
    backend: str, narrow: bool, exported: Callable[..., Exported]
) -> None:
    made = exported("cnn", backend, narrow=narrow)
    file, events = made.file, made.events
    metadata = {entry.key: entry.value for entry in onnx.load(file.path).metadata_props}
    named = json.loads(metadata["saturating_layers_without_vnni"])
    notices = [event.text for event in events if isinstance(event, Notice) and "layers can saturate" in event.text]
    assert events.metrics["num_saturating_layers"] == len(named)
    if narrow:
        assert (named, notices) == ([], [])
        return
    assert {"2.0", "5"} <= set(named)  # the names of the model's modules, not those of their fused parts
    assert "0.0" not in named  # its one channel has zeros for neighbors
    assert len(notices) == 1
    assert "reduce_range: true" in notices[0]
    assert named[0] in notices[0]


def test_the_remedy_of_dynamic_layers(run_export: Export, dynamic_model: Make, events) -> None:
    run_export(dynamic_model("cnn", "fbgemm", per_channel=True))
    (notice,) = (event.text for event in events if isinstance(event, Notice) and "layers can saturate" in event.text)
    assert "quantize with `reduce_range: true`" in notice


def test_what_saturation_changes_is_measured_where_it_happens(exported: Callable[..., Exported]) -> None:
    made = exported("cnn", "qnnpack")
    found = [event.text for event in made.events if isinstance(event, Notice) and "saturation changes" in event.text]
    largest = made.events.metrics.get("saturation_max_abs_logit_difference")
    assert (largest is not None) is may_saturate()
    if largest:
        assert len(found) == 1
        assert f"logits by up to {largest:.4g} of " in found[0]
        assert "% of the predicted classes" in found[0]
    else:
        assert not found
