"""Static and quantization-aware int8 models.

Shape legend: N samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import pytest
import torch
import torch.ao.nn.quantized as nnq
from onnx import TensorProto, numpy_helper

from ptpipe import Progress, StageError
from ptpipe_onnx import qdq_passes
from ptpipe_torch import Data, Model, OnnxFile
from ptpipe_torch.int8.engine import quantized_engine

from ...signatures import logits_from
from .conftest import NARROW, Exported

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]

CASES = [
    ("cnn", "fbgemm", False, 127),
    ("cnn", "qnnpack", True, 255),
    ("residual", "x86", True, 127),
    ("residual", "qnnpack", False, 255),
    ("mobile", "onednn", False, NARROW),
    ("mobile", "fbgemm", True, 127),
]


def torch_weights(model: Model) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Integers and scales of the layers as torch's own int8 model has them."""
    with quantized_engine(model.recipe.backend):
        for layer in model.build().modules():
            if isinstance(layer, nnq.Conv2d | nnq.Linear):
                weight = layer.weight()
                is_per_tensor = weight.qscheme() == torch.per_tensor_affine
                scales = np.array(weight.q_scale()) if is_per_tensor else weight.q_per_channel_scales().numpy()
                yield weight.int_repr().numpy(), scales


def file_weights(path: object) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    graph = onnx.load(path).graph
    arrays = {array.name: numpy_helper.to_array(array) for array in graph.initializer}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in arrays and arrays[node.input[0]].dtype == np.int8:
            yield arrays[node.input[0]], arrays[node.input[1]]


@pytest.mark.parametrize(("name", "backend", "qat", "narrow"), CASES)
def test_the_file_computes_what_torch_computes(
    name: str, backend: str, qat: bool, narrow: bool, exported: Callable[..., Exported]
) -> None:
    made = exported(name, backend, qat=qat, narrow=narrow)
    model, file, metrics = made.model, made.file, made.events.metrics
    assert file.format == "onnx int8"
    assert file.parity["top1_agreement"] >= 0.99
    assert file.parity["max_logit_difference_steps"] <= (3.01 if name == "mobile" else 1.01)
    assert file.parity["mean_logit_difference_steps"] < (0.1 if name == "mobile" else 0.05)
    assert file.parity["rms_logit_difference"] < 0.5 * file.parity["rms_quantization_error"]

    expected_weights, found_weights = (
        sorted(pairs, key=lambda pair: pair[0].tobytes()) for pairs in (torch_weights(model), file_weights(file.path))
    )
    assert len(expected_weights) > 2
    for (expected, expected_scales), (found, found_scales) in zip(expected_weights, found_weights, strict=True):
        np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
        assert not found[:, expected.shape[1] :].any()  # channels that the file appends to its input
        np.testing.assert_array_equal(found_scales, expected_scales.astype(np.float32))

    assert metrics["num_int8_nodes"] >= 6
    assert metrics["num_float_nodes"] == (2 if name == "mobile" else 0)  # hard swish has no integer kernel
    dtypes = {array.data_type for array in onnx.load(file.path).graph.initializer if len(array.dims) > 1}
    assert dtypes == {TensorProto.INT8}
    metadata = {entry.key: entry.value for entry in onnx.load(file.path).metadata_props}
    assert (metadata["backend"], metadata["precision"]) == (backend, "int8")
    assert metadata["exact_integer_sums_on_x86"].startswith("yes" if narrow else "only with VNNI")
    assert metrics["layers_identical"] == sum(1 for _ in torch_weights(model))
    assert metrics["layers_compared"] >= metrics["layers_identical"] + 1  # and the input
    assert metrics["max_layer_difference_steps"] <= 1


def test_a_user_sees_what_is_being_done(exported: Callable[..., Exported]) -> None:
    """The export takes tens of seconds before the first prediction."""
    events = [event for event in exported("cnn", "fbgemm", qat=False, narrow=127).events if isinstance(event, Progress)]
    assert [event.facts["doing"] for event in events[:2]] == ["exporting the network", "comparing layers with torch's"]
    assert {event.unit for event in events[2:]} == {"predictions"}


def round_biases(network: torch.nn.Module) -> None:
    """Let torch's int8 layers add biases rounded to the grid of their sums of products, from their first call on."""

    def round_bias(layer: nnq.Conv2d | nnq.Linear, inputs: tuple[torch.Tensor]) -> None:
        weight, bias_K = layer.weight(), layer.bias().detach().numpy()
        is_per_tensor = weight.qscheme() == torch.per_tensor_affine
        scales = np.array(weight.q_scale()) if is_per_tensor else weight.q_per_channel_scales().numpy()
        grid = np.float32(inputs[0].q_scale()) * scales.astype(np.float32)
        rounded_K = np.rint(bias_K / grid.astype(np.float64)) * grid
        layer.set_weight_bias(weight, torch.from_numpy(rounded_K.astype(np.float32)))

    for layer in network.modules():
        if isinstance(layer, nnq.Conv2d | nnq.Linear):
            layer.register_forward_pre_hook(round_bias)


@pytest.mark.parametrize(("name", "backend", "qat", "narrow"), CASES)
def test_all_that_differs_is_the_rounding_of_biases(
    name: str, backend: str, qat: bool, narrow: bool, exported: Callable[..., Exported], digits: Data, run_onnx
) -> None:
    """With these rounded alike, torch's kernels and the file compute the same integers."""
    made = exported(name, backend, qat=qat, narrow=narrow)
    model, file = made.model, made.file
    (batch,) = digits.batches("test", batch_size=300)
    with quantized_engine(backend), torch.no_grad():
        network = model.build()
        round_biases(network)
        expected_NK = network(batch.inputs["images"]).numpy()
    found_NK = run_onnx(file.path, batch.inputs["images"].numpy(), optimize=True)
    steps_NK = np.abs(found_NK - expected_NK) / integer_step(file)
    assert steps_NK.max() < 0.01
    assert np.ptp(expected_NK) > 90 * integer_step(file)
    accuracy = np.mean(found_NK.argmax(1) == batch.targets["labels"].numpy())
    assert accuracy > 0.65  # logits of a network that tells digits apart, not noise


def test_most_of_the_file_is_weights_of_a_byte(exported: Callable[..., Exported], float_model: Make) -> None:
    num_weights = sum(tensor.numel() for tensor in float_model("cnn").tensors.values() if tensor.dim() > 1)
    assert exported("cnn", "fbgemm").file.size_bytes < num_weights + 8000


def test_what_calibration_did_not_see_saturates_as_in_torch(
    exported: Callable[..., Exported], digits: Data, run_onnx: Callable[..., np.ndarray]
) -> None:
    made = exported("cnn", "fbgemm", narrow=True)
    model, file = made.model, made.file
    (batch,) = digits.batches("test", batch_size=300)
    images_NCHW = np.ascontiguousarray(
        batch.inputs["images"].numpy() * np.linspace(1, 6, 300)[:, None, None, None], np.float32
    )
    with model.predictor() as predict:
        expected_NK = logits_from(predict, images_NCHW)
    found_NK = run_onnx(file.path, images_NCHW, optimize=True)
    step = integer_step(file)
    steps_NK = np.abs(found_NK - expected_NK) / step
    assert steps_NK.max() < 2.5
    assert steps_NK.mean() < 0.1
    assert np.ptp(expected_NK) > 130 * step


def integer_step(file: OnnxFile) -> float:
    graph = onnx.load(file.path).graph
    (scale,) = (array for array in graph.initializer if array.name == graph.node[-1].input[1])
    return numpy_helper.to_array(scale).item()


def test_a_graph_that_computes_something_else_fails_with_figures(
    run_export: Export, int8_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = qdq_passes.use_integer_kernels

    def rewrite_badly(model: object) -> None:
        rewrite(model)
        clips = [value for value in model.graph.initializers.values() if value.name.endswith("bias.int32")]
        for value in clips:
            content = value.const_value.numpy()
            value.const_value = type(value.const_value)(np.zeros_like(content), name=value.name)

    monkeypatch.setattr(qdq_passes, "use_integer_kernels", rewrite_badly)
    with pytest.raises(
        StageError, match=r"layer 0\.0 is not the model's: its int32 bias: 0 at \(0,\), 8 of 8 differ, in"
    ):
        run_export(int8_model("cnn"))


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_padding_that_the_reference_form_of_torch_drops_is_refused(
    backend: str, run_export: Export, int8_model: Make
) -> None:
    with pytest.raises(StageError, match=r"layer 0 is not the model's: its padding mode: zeros, in the model: reflect"):
        run_export(int8_model("reflect", backend))


def test_layers_left_float_stay_float(run_export: Export, int8_model: Make, events) -> None:
    model = int8_model("residual", skip="inner")
    file = run_export(model)
    assert file.parity["max_logit_difference_steps"] <= 1.01
    convs = [node for node in onnx.load(file.path).graph.node if node.op_type == "Conv"]
    assert len(convs) == 3
    assert events.metrics["num_float_nodes"] >= 2
    dtypes = [array.data_type for array in onnx.load(file.path).graph.initializer if len(array.dims) == 4]
    assert sorted(dtypes) == [TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT8]
