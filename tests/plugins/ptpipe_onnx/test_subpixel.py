"""Transposed convolutions that a file computes as convolutions, and the check that they are the model's.

Shape legend: N samples, I input channels, O output channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import nn

from ptpipe import Context, StageError
from ptpipe_onnx import ExportConfig, export_onnx, torch_exporter
from ptpipe_onnx.graph import add_initializer
from ptpipe_onnx.saturation import saturation_of
from ptpipe_onnx.subpixel import Subpixel, evaluated, trimmed, write_as_convolutions
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import Data, FunctionRef, Model, Recipe, builder
from ptpipe_torch.int8.engine import supported_engines

from ...signatures import classifier
from .conftest import RecordedEvents
from .test_latency_passes import passed, run_types
from .test_qdq_passes import Draft, types_of

F = nn.functional
Run = Callable[..., np.ndarray]
RNG = np.random.default_rng(5)
BACKENDS = [backend for backend in ("fbgemm", "qnnpack") if backend in supported_engines()]


@given(
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    stride=st.integers(1, 4),
    pads=st.tuples(*[st.integers(0, 3)] * 2),
    added=st.tuples(*[st.integers(0, 3)] * 2),
)
def test_the_form_computes_what_the_transposed_convolution_does(
    kernel: tuple[int, int], stride: int, pads: tuple[int, int], added: tuple[int, int]
) -> None:
    added = (min(added[0], stride - 1), min(added[1], stride - 1))
    form = Subpixel.of(kernel, (stride, stride), pads * 2, added)
    sides = zip((4, 5), pads, kernel, added, strict=True)
    sizes = [stride * (size - 1) - 2 * pad + num_taps + more for size, pad, num_taps, more in sides]
    if form is None or min(sizes) < 1:
        assert any(size < given * stride for size, given in zip(sizes, (4, 5), strict=True))
        return
    weight_IOHW = RNG.integers(-9, 10, (3, 2, *kernel)).astype(np.float64)
    x = torch.from_numpy(RNG.integers(-9, 10, (2, 3, 4, 5)).astype(np.float64))
    expected = F.conv_transpose2d(x, torch.from_numpy(weight_IOHW), None, stride, pads, added)
    top, left, bottom, right = form.pads
    weight_OIHW = torch.from_numpy(np.ascontiguousarray(form.arranged(weight_IOHW)))
    found = F.conv2d(F.pad(x, (left, right, top, bottom)), weight_OIHW)
    assert torch.equal(F.pixel_shuffle(found, stride)[..., : sizes[0], : sizes[1]], expected)
    assert [stride * size - axis.num_cropped for size, axis in zip(found.shape[2:], form.axes, strict=True)] == sizes


@given(kernel=st.integers(1, 9), stride=st.integers(1, 5), pad=st.integers(0, 4), added=st.integers(0, 3))
def test_along_one_axis(kernel: int, stride: int, pad: int, added: int) -> None:
    added = min(added, stride - 1)
    form = Subpixel.of((kernel,), (stride,), (pad, pad), (added,))
    size = stride * 6 - 2 * pad + kernel + added
    if form is None or size < 1:
        assert size < 7 * stride
        return
    weight_IOK = RNG.integers(-9, 10, (3, 2, kernel)).astype(np.float64)
    x, bias_O = (torch.from_numpy(RNG.integers(-9, 10, shape).astype(np.float64)) for shape in ((2, 3, 7), (2,)))
    expected = F.conv_transpose1d(x, torch.from_numpy(weight_IOK), bias_O, stride, pad, added)
    weight = torch.from_numpy(np.ascontiguousarray(form.arranged(weight_IOK)))
    by_place = F.conv1d(F.pad(x, form.pads), weight, torch.from_numpy(form.repeated(bias_O.numpy())))
    assert torch.equal(by_place.transpose(1, 2).reshape(2, -1, 2).transpose(1, 2)[..., :size], expected)


def test_three_axes_have_no_form() -> None:
    assert Subpixel.of((2, 2, 2), (2, 2, 2), (0,) * 6, (0,) * 3) is None


def upsampling(
    kernel: int = 4, padding: int = 1, *, stride: int = 2, added: int = 0, **options: Any
) -> onnx.ModelProto:
    """A graph of one int8 transposed convolution."""
    group, dilation = options.get("group", 1), options.get("dilation", 1)
    weight_IOHW = RNG.integers(-127, 128, (4, 6 // group, kernel, kernel))
    draft = Draft()
    value = draft.quantize("images", 0.05, 90) if options.get("is_int8", True) else "images"
    scales = np.linspace(0.005, 0.02, 6) if options.get("per_channel") else options.get("scale", 0.01)
    bias = draft.array(RNG.normal(size=6), np.float32)
    if options.get("has_integer_bias"):
        grid = [draft.array(0.05 * scales, np.float32), draft.array(np.zeros(np.shape(scales)), np.int32)]
        bias = draft.node("DequantizeLinear", [draft.array(RNG.integers(-999, 999, 6), np.int32), *grid], axis=0)
    inputs = [value, draft.weight(weight_IOHW, scales, axis=1), bias]
    sizes = {"strides": [stride] * 2, "pads": [padding] * 4, "output_padding": [added] * 2, "dilations": [dilation] * 2}
    value = draft.node("ConvTranspose", inputs, group=group, **sizes)
    return draft.finished(draft.quantize(value, 0.1, 128), ("N", 4, 6, 6))


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    return passed(model, write_as_convolutions)


IMAGES_NCHW = (RNG.normal(size=(3, 4, 6, 6)) * 4).astype(np.float32)


@pytest.mark.parametrize(
    ("kernel", "padding", "stride", "added"),
    [
        *((2, 0, 2, 0), (3, 1, 2, 1), (4, 1, 2, 0), (3, 1, 1, 0), (5, 1, 3, 0)),
        *((3, 0, 2, 0), (4, 0, 2, 0), (3, 1, 2, 0), (5, 0, 1, 0), (7, 2, 3, 1)),  # of other lengths
    ],
)
def test_the_graph_computes_the_same(kernel: int, padding: int, stride: int, added: int, run_onnx: Run) -> None:
    model = upsampling(kernel, padding, stride=stride, added=added)
    after = rewritten(model)
    types = types_of(after)
    assert (types["ConvTranspose"], types["Conv"], types["DepthToSpace"]) == (0, 1, int(stride > 1))
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    assert np.ptp(expected) > 5
    found = run_onnx(after.SerializeToString(), IMAGES_NCHW)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.101)  # sums of floats in another order, at a tie
    assert (found != expected).mean() < 1e-3


@pytest.mark.parametrize(
    "options",
    [{"per_channel": True}, {"per_channel": True, "has_integer_bias": True}, {"has_integer_bias": True}],
    ids=str,
)
def test_what_a_quantizer_writes(options: dict[str, bool], run_onnx: Run) -> None:
    """A scale for each output channel, and a bias of integers."""
    model = upsampling(4, 0, **options)
    after = rewritten(model)
    assert types_of(after)["ConvTranspose"] == 0
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    np.testing.assert_allclose(run_onnx(after.SerializeToString(), IMAGES_NCHW), expected, rtol=0, atol=0.101)


def test_one_scale_along_an_axis(run_onnx: Run) -> None:
    """As a quantizer writes that of a layer with one output channel."""
    draft = Draft()
    weight_IOHW = RNG.integers(-127, 128, (4, 1, 4, 4))
    inputs = [draft.quantize("images", 0.05, 90), draft.weight(weight_IOHW, [0.01], axis=1)]
    value = draft.node("ConvTranspose", inputs, strides=[2, 2])
    model = draft.finished(draft.quantize(value, 0.1, 128), ("N", 4, 6, 6))
    expected = run_onnx(model.SerializeToString(), IMAGES_NCHW)
    found = run_onnx(rewritten(model).SerializeToString(), IMAGES_NCHW)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.101)


def test_weights_take_no_more_bytes() -> None:
    sizes = {
        array.name: len(numpy_helper.to_array(array).tobytes())
        for array in rewritten(upsampling(4, 1)).graph.initializer
        if array.data_type == onnx.TensorProto.INT8 and array.dims
    }
    assert sum(sizes.values()) == 4 * 6 * 16


def test_an_integer_kernel_runs_it(tmp_path: Path) -> None:
    types = run_types(rewritten(upsampling()), tmp_path)
    assert {"DepthToSpace"} <= types
    assert not {"ConvTranspose", "Slice", "Reshape"} & types


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"group": 2}, id="groups"),
        pytest.param({"dilation": 2}, id="dilation"),
        pytest.param({"kernel": 2, "padding": 2, "stride": 1}, id="cropped by more than the kernel"),
        pytest.param({"is_int8": False}, id="float input"),
    ],
)
def test_others_are_left_alone(options: dict[str, Any]) -> None:
    assert types_of(rewritten(upsampling(**options)))["ConvTranspose"] == 1


def test_zeros_in_front_are_not_stored() -> None:
    kernel_IOHW = np.pad(RNG.integers(1, 9, (3, 2, 2, 2)), ((0, 0), (0, 0), (1, 0), (1, 0)))
    weight_IOHW, pads = trimmed(kernel_IOHW, (1, 1, 1, 1))
    np.testing.assert_array_equal(weight_IOHW, kernel_IOHW[:, :, 1:, 1:])
    assert pads == (0, 0, 1, 1)
    assert Subpixel.of((2, 2), (2, 2), pads, (1, 1)) == Subpixel.of((2, 2), (2, 2), (0,) * 4, (0, 0))
    assert trimmed(kernel_IOHW, (0,) * 4)[0] is kernel_IOHW


@builder
def decoder(*, kernel: int, padding: int, added: int) -> nn.Module:
    up = nn.ConvTranspose2d(8, 6, kernel, 2, padding, output_padding=added)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), up, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 10, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


@pytest.fixture
def ctx(tmp_path: Path, events: RecordedEvents) -> Context:
    return Context(stage_id="int8", kind="quant.test", seed=7, scratch=tmp_path, _tell=events.append)


def int8(ctx: Context, data: Data, backend: str, build: Callable[..., nn.Module] = decoder, **sizes: int) -> Model:
    torch.manual_seed(0)
    reference = FunctionRef.to(build, **sizes)
    model = Model.from_module(Recipe(reference, classifier((1, 16, 16), 10)), build(**sizes))
    prepared = prepare(PrepareConfig(backend=backend), ctx, model)  # type: ignore[arg-type]
    return convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, data).model)


@pytest.fixture(scope="module")
def traced() -> dict[str, ir.Model]:
    return {}


@pytest.fixture
def traced_once(traced: dict[str, ir.Model], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace the network of a test once: it takes seconds, and the test's parameters are faults of what follows."""
    name, export = request.node.originalname, torch_exporter.export

    def export_once(*arguments: Any) -> ir.Model:
        if name not in traced:
            traced[name] = export(*arguments)
        return traced[name].clone()

    monkeypatch.setattr(torch_exporter, "export", export_once)


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(2, 0, 0), (3, 1, 1), (4, 1, 0), (3, 0, 0)], ids=str)
def test_every_layer_of_a_decoder_is_int8(
    sizes: tuple[int, int, int], backend: str, digits: Data, ctx: Context, events: RecordedEvents
) -> None:
    kernel, padding, added = sizes
    model = int8(ctx, digits, backend, kernel=kernel, padding=padding, added=added)
    file = export_onnx(ExportConfig(num_samples=64), ctx, model, digits)  # compares all integers with the model's
    assert events.metrics["num_float_layers"] == 0
    assert events.metrics["max_layer_difference_steps"] <= 1
    bounds = saturation_of(ir.load(file.path).graph, {}).layers
    assert [bound.name for bound in bounds] == ["0.0", "2", "5"]
    (weight,) = (array for array in onnx.load(file.path).graph.initializer if array.dims[:2] == [8, 6])
    assert list(weight.dims[2:]) == [kernel, kernel]


class Sequences(nn.Module):
    """Doubles the length of sequences, and halves it again."""

    def __init__(self, kernel: int, padding: int, added: int, num_layers: int = 1) -> None:
        super().__init__()
        widths = range(16, 16 + 2 * num_layers, 2)
        ups = [nn.ConvTranspose1d(width, width + 2, kernel, 2, padding, output_padding=added) for width in widths]
        self.ups = nn.Sequential(*(part for up in ups for part in (up, nn.ReLU())))
        self.down = nn.Conv1d(16 + 2 * num_layers, 10, 3, 2)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.down(self.ups(images_NCHW.squeeze(1))).amax(2)


@builder
def sequences(*, kernel: int, padding: int, added: int, num_layers: int) -> nn.Module:
    return Sequences(kernel, padding, added, num_layers)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(2, 0, 0, 2), (3, 1, 1, 1), (8, 3, 0, 1), (8, 0, 0, 1), (5, 1, 0, 2)], ids=str)
def test_layers_of_sequences_are_int8(
    sizes: tuple[int, int, int, int], backend: str, digits: Data, ctx: Context, events: RecordedEvents, tmp_path: Path
) -> None:
    kernel, padding, added, num_layers = sizes
    options = {"kernel": kernel, "padding": padding, "added": added, "num_layers": num_layers}
    model = int8(ctx, digits, backend, sequences, **options)
    file = export_onnx(ExportConfig(num_samples=64), ctx, model, digits)
    assert events.metrics["layers_identical"] == num_layers + 1
    assert events.metrics["max_layer_difference_steps"] <= 1
    assert events.metrics["integer_coverage"] == f"{num_layers + 1} of {num_layers + 1} convolutions"
    assert not {"ConvTranspose", "DepthToSpace"} & run_types(onnx.load(file.path), tmp_path)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("what", ["weight", "order", "shape"])
def test_a_file_with_another_layer_of_sequences_is_refused(
    what: str, digits: Data, ctx: Context, monkeypatch: Any
) -> None:
    from ptpipe_onnx import qdq_passes

    def tampered(graph: ir.Graph) -> None:
        write_as_convolutions(graph)
        (reshape,) = (node for node in graph if node.outputs[0].name.endswith(".interleaved"))
        (flip,) = (node for node in graph if node.op_type == "Slice")
        if what == "order":
            reshape.inputs[0].producer().attributes["perm"] = ir.AttrInt64s("perm", (0, 1, 2))
        elif what == "shape":
            reshape.replace_input_with(1, ir.Value(name="other", const_value=ir.tensor(np.array([0, -1, 9]))))
        else:
            flip.outputs[0].replace_all_uses_with(flip.inputs[0])

    monkeypatch.setattr(qdq_passes, "write_as_convolutions", tampered)
    model = int8(ctx, digits, BACKENDS[0], sequences, kernel=8, padding=3, added=0, num_layers=1)
    with pytest.raises(StageError, match=r"layer ups\.0 is not the model's: its (int8 weights|outputs interleaved)"):
        export_onnx(ExportConfig(num_samples=64), ctx, model, digits)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("tampered_with", ["crop", "axes", "nothing"])
def test_a_file_that_crops_otherwise_is_refused(
    tampered_with: str, digits: Data, ctx: Context, monkeypatch: Any
) -> None:
    from ptpipe_onnx import qdq_passes

    def tampered(graph: ir.Graph) -> None:
        write_as_convolutions(graph)
        (crop,) = (node for node in graph if node.op_type == "Slice" and len(node.inputs) == 4)
        numbers = {"crop": (2, [-2, -2]), "axes": (3, [2, 1]), "nothing": (2, [-1, -1])}
        index, values = numbers[tampered_with]
        crop.replace_input_with(index, add_initializer(graph, "other", np.array(values)))

    monkeypatch.setattr(qdq_passes, "write_as_convolutions", tampered)
    model = int8(ctx, digits, BACKENDS[0], kernel=3, padding=0, added=0)
    if tampered_with == "nothing":
        export_onnx(ExportConfig(num_samples=64), ctx, model, digits)
        return
    with pytest.raises(StageError, match="layer 2 is not the model's: its outputs interleaved by the stride"):
        export_onnx(ExportConfig(num_samples=64), ctx, model, digits)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("what", ["weight", "arrangement", "mode"])
def test_a_file_with_another_layer_is_refused(what: str, digits: Data, ctx: Context, monkeypatch: Any) -> None:
    from ptpipe_onnx import qdq_passes

    def tampered(graph: ir.Graph) -> None:
        write_as_convolutions(graph)
        (interleave,) = (node for node in graph if node.op_type == "DepthToSpace")
        (flip,) = (node for node in graph if node.op_type == "Slice")
        if what == "mode":
            interleave.attributes["mode"] = ir.AttrString("mode", "DCR")
        elif what == "arrangement":
            flip.outputs[0].replace_all_uses_with(flip.inputs[0])
        else:
            stored = flip.inputs[0].producer().inputs[0].producer().inputs[0]
            content = stored.const_value.numpy().copy()
            content.flat[5] += 1
            stored.const_value = ir.tensor(content, name=stored.name)

    monkeypatch.setattr(qdq_passes, "write_as_convolutions", tampered)
    model = int8(ctx, digits, BACKENDS[0], kernel=4, padding=1, added=0)
    words = "outputs interleaved by the stride" if what == "mode" else "int8 weights"
    with pytest.raises(StageError, match=f"layer 2 is not the model's: its {words}"):
        export_onnx(ExportConfig(num_samples=64), ctx, model, digits)


def test_what_arranges_a_weight_is_evaluated() -> None:
    read = ir.serde.deserialize_model(rewritten(upsampling(5, 1, stride=3)))
    (convolution,) = (node for node in read.graph if node.op_type == "Conv")
    dequantize = convolution.inputs[1].producer()
    content = evaluated(dequantize.inputs[0])
    assert content is not None
    assert content.shape == (54, 4, 3, 3)
    assert evaluated(convolution.inputs[0]) is None
