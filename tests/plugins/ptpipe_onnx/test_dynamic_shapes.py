"""Files of networks that take pictures of any size.

Shape legend: N pictures, C channels, H height, W width, P places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ptpipe import Context, StageError
from ptpipe.events import Event, Metric
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_torch import Data, FunctionRef, Model, OnnxFile, Recipe
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.model.function_ref import builder
from ptpipe_torch.parity.comparison import ComparedSamples, Exported
from ptpipe_torch.parity.other_sizes import check_other_sizes
from ptpipe_torch.runtime import seeded
from ptpipe_zoo import DynamicShapesConfig, dynamic_shapes

from ...streets import street_data
from ...texts import quantized

F = nn.functional
PATHS = [("float", ""), ("dynamic", "fbgemm"), ("static", "fbgemm"), ("static", "qnnpack")]
PATHS += [("qat", "fbgemm"), ("qat", "qnnpack")]
QUICK = {
    "enlarging": [("static", "fbgemm"), ("qat", "qnnpack")],
    "doubling": [("float", ""), ("qat", "fbgemm")],
    "attending": [("dynamic", "fbgemm"), ("static", "qnnpack")],
}
"""Each form and each network on either backend; all others in a thorough run."""


class Enlarging(nn.Module):
    """A U-Net that pads what it enlarged to the size of what it skips; sizes are read in several spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.Hardswish())
        self.squeeze, self.up = nn.Linear(16, 16), nn.ConvTranspose2d(16, 16, 2, 2)
        self.last, self.head = nn.Conv2d(32, 8, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        first = self.first(images_NCHW)
        second = self.second(first)
        third = self.third(second)
        num, channels, _, _ = third.size()
        third = third * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(third, 1).view(num, channels))).view(
            num, channels, 1, 1
        )
        up = self.up(third)
        height, width = second.shape[2], second.shape[-1]
        up = F.pad(up, [0, width - up.size(3), 0, height - up.size()[2]])
        last = F.interpolate(torch.relu(self.last(torch.cat([up, second], 1))), size=first.shape[-2:])
        return self.head(torch.cat([last, first], 1))


class Doubling(nn.Module):
    """Shuffles channels and pixels; its pictures have even sides."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mix = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up, self.shuffle = nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.down(images_NCHW))
        num, channels, height, width = x.shape
        x = x.view(num, 2, channels // 2, height, width).transpose(1, 2).reshape(num, channels, height, width)
        return images_NCHW + self.shuffle(self.up(torch.relu(self.mix(x))))


class Attending(nn.Module):
    """Places of a picture attend to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv, self.out = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48), nn.Linear(16, 16)
        self.pixels = nn.ConvTranspose2d(16, 3, 4, 4)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.patches(images_NCHW)
        places_NPC = x.flatten(2).transpose(1, 2)
        attended_NPC = F.scaled_dot_product_attention(*self.qkv(places_NPC).chunk(3, -1))
        return self.pixels((places_NPC + self.out(attended_NPC)).transpose(1, 2).reshape(x.shape))


NETWORKS = {"enlarging": (Enlarging, ""), "doubling": (Doubling, "2*"), "attending": (Attending, "4*")}


@builder
def network(name: str) -> nn.Module:
    return NETWORKS[name][0]()


@pytest.fixture(scope="module")
def data() -> Data:
    return street_data()


Make = Callable[[str], Model]


@pytest.fixture(scope="module")
def make(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A network with batch norm statistics of the streets, for pictures of any size."""
    ctx = Context("net", "model.test", 7, tmp_path_factory.mktemp("scratch"))

    def made(name: str) -> Model:
        with seeded(0), torch.no_grad():
            module = network(name).train()
            for batch in data.batches("train"):
                module(*batch.args)
        factor = NETWORKS[name][1]
        model = Model.from_module(Recipe(FunctionRef.to(network, name=name), data.info.signature), module)
        config = DynamicShapesConfig(inputs={"images": [3, f"{factor}height", f"{factor}width"]})
        return dynamic_shapes(config, ctx, model)

    return made


def sizes_of(file: OnnxFile) -> list[list[str | int]]:
    graph = onnx.load(file.path).graph
    values = (*graph.input, *graph.output)
    return [[axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in values]


@pytest.mark.parametrize(
    ("name", "path", "backend"),
    [
        pytest.param(name, *of, marks=[] if of in QUICK[name] else pytest.mark.thorough)
        for name in NETWORKS
        for of in PATHS
        if (name, of[0]) != ("doubling", "dynamic")  # which has no linear layer
    ],
)
def test_a_file_computes_what_torch_does_for_pictures_of_any_size(
    name: str, path: str, backend: str, data: Data, make: Make, tmp_path: Path
) -> None:
    if backend and backend not in supported_engines():
        pytest.skip(f"no {backend} here")
    events: list[Event] = []
    ctx = Context("net", "export.onnx", 7, tmp_path, _tell=events.append)
    model = make(name) if path == "float" else quantized(make(name), data, ctx, backend, path)
    file = export_onnx(ExportConfig(num_samples=8), ctx, model, data)
    factor = NETWORKS[name][1]
    assert sizes_of(file) == [["batch", 3, f"{factor}height", f"{factor}width"]] * 2
    assert [event.value for event in events if isinstance(event, Metric) and event.name == "num_other_sizes"] == [2]
    with file.with_exact_sums().predictor(1) as predict, model.predictor(1) as expect:
        for height, width in ((64, 64), (8, 116), (100, 12), *(() if factor else ((33, 7), (1, 3)))):
            inputs = {"images": np.random.default_rng(0).normal(size=(2, 3, height, width)).astype(np.float32)}
            found, expected = predict(inputs)["logits"], expect(inputs)["logits"]
            assert found.shape == expected.shape == (2, 3, height, width)
            step = 0.0 if path in ("float", "dynamic") else np.diff(np.unique(expected)).min()
            assert np.abs(found - expected).max() <= 1.01 * step + 1e-5 * np.ptp(expected)


@pytest.mark.parametrize("layout", ["nhwc", pytest.param("nchw", marks=pytest.mark.thorough)])
def test_it_takes_bytes_of_pictures_of_any_size(layout: str, data: Data, make: Make, tmp_path: Path) -> None:
    ctx = Context("net", "export.onnx", 7, tmp_path)
    model = quantized(make("doubling"), data, ctx, "fbgemm", "static")
    config = ExportConfig(num_samples=8, preprocessing=layout, postprocessing=True)
    file = export_onnx(config, ctx, model, data)
    sides = ["2*height", "2*width"]
    channels_second, classes = ["batch", 3, *sides], ["batch", *sides]
    axes = ["batch", *sides, 3] if layout == "nhwc" else channels_second
    assert sizes_of(file) == [axes, channels_second, channels_second, classes]
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (2, 50, 22, 3), dtype=np.uint8)
    normalized = ((pixels_NHWC / 255 - 0.4) / 0.3).astype(np.float32).transpose(0, 3, 1, 2)
    raw = pixels_NHWC if layout == "nhwc" else pixels_NHWC.transpose(0, 3, 1, 2)
    with file.with_exact_sums().predictor(1) as predict, model.predictor(1) as expect:
        found = predict({"images": np.ascontiguousarray(raw)})["logits"]
        expected = expect({"images": np.ascontiguousarray(normalized)})["logits"]
    assert np.abs(found - expected).max() <= 1.01 * np.diff(np.unique(expected)).min() + 1e-5


def test_resizing_has_no_meaning_there(data: Data, make: Make, tmp_path: Path) -> None:
    config = ExportConfig(num_samples=8, preprocessing="nhwc", resize=True)
    with pytest.raises(StageError, match=r"^resize: the network takes images of any size .*: leave resize out"):
        export_onnx(config, Context("net", "export.onnx", 7, tmp_path), make("doubling"), data)


class Padding(nn.Module):
    """Pads by a difference that is 0 or -1."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 3, 1)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        up = self.up(torch.relu(self.down(images_NCHW)))
        more = images_NCHW.shape[3] - up.shape[3]
        return self.head(torch.cat([F.pad(up, (more // 2, more - more // 2)), images_NCHW], 1))


class Grids(nn.Module):
    """Pools to grids, knows where a place is, and enlarges to the size that the picture had."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(5, 8, 3, 2, 1), nn.ConvTranspose2d(8, 3, 3, 2, 1)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        height, width = images_NCHW.shape[2:]
        rows_1H1 = torch.linspace(-1, 1, height)[None, :, None] * torch.ones(1, 1, width)
        columns_1HW = torch.linspace(0.5, 2, steps=width).expand(1, height, -1)
        places_NCHW = torch.stack([rows_1H1, columns_1HW], 1).expand(len(images_NCHW), -1, -1, -1)
        x = torch.relu(self.down(torch.cat([images_NCHW, places_NCHW], 1)))
        rows = F.adaptive_avg_pool2d(x, (3, None)).mean(2, keepdim=True)
        x = x + F.interpolate(F.adaptive_avg_pool2d(x, 2) + F.adaptive_max_pool2d(x, (2, 1)), size=x.shape[2:]) + rows
        x = x * F.adaptive_avg_pool1d(x.flatten(2), 5).mean(2)[..., None, None]
        return self.up(x, output_size=images_NCHW.shape[2:])


class Halved(nn.Module):
    """Has as many windows as half of the places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.conv(images_NCHW)
        return F.interpolate(F.adaptive_avg_pool2d(x, (2, x.shape[3] // 2)), size=x.shape[2:])


class TopDown(nn.Module):
    """Enlarges maps to the size of a layer's own output, as a feature pyramid does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.fine, self.coarse, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.first(images_NCHW))
        fine, coarse = self.fine(first), self.coarse(torch.relu(self.second(first)))
        return F.interpolate(self.head(fine + F.interpolate(coarse, size=fine.shape[2:])), images_NCHW.shape[2:])


@builder
def small_network(name: str) -> nn.Module:
    return {"padding": Padding, "grids": Grids, "halved": Halved, "top_down": TopDown}[name]()


def with_any_width(name: str, data: Data, ctx: Context, shape: Sequence[int | str] = (3, 32, "width")) -> Model:
    with seeded(0):
        model = Model.from_module(
            Recipe(FunctionRef.to(small_network, name=name), data.info.signature), small_network(name)
        )
    return dynamic_shapes(DynamicShapesConfig(inputs={"images": list(shape)}), ctx, model)


def test_sizes_below_zero_are_rounded_as_python_does(data: Data, tmp_path: Path) -> None:
    ctx = Context("net", "export.onnx", 7, tmp_path)
    model = with_any_width("padding", data, ctx)
    file = export_onnx(ExportConfig(num_samples=8), ctx, model, data)
    with file.predictor(1) as predict, model.predictor(1) as expect:
        for width in (40, 33, 31, 101):
            inputs = {"images": np.random.default_rng(0).normal(size=(2, 3, 32, width)).astype(np.float32)}
            np.testing.assert_allclose(predict(inputs)["logits"], expect(inputs)["logits"], atol=1e-5)


def test_a_layer_whose_sizes_are_read_is_an_integer_kernel(data: Data, tmp_path: Path) -> None:
    events: list[Event] = []
    ctx = Context("net", "export.onnx", 7, tmp_path, _tell=events.append)
    model = quantized(
        with_any_width("top_down", data, ctx, (3, "4*height", "4*width")), data, ctx, supported_engines()[0], "static"
    )
    file = export_onnx(ExportConfig(num_samples=8), ctx, model, data)
    (coverage,) = [event.value for event in events if isinstance(event, Metric) and event.name == "integer_coverage"]
    assert coverage == "5 of 5 convolutions"
    with file.with_exact_sums().predictor(1) as predict, model.predictor(1) as expect:
        for width in (40, 32, 100):
            inputs = {"images": np.random.default_rng(0).normal(size=(2, 3, 32, width)).astype(np.float32)}
            found, expected = predict(inputs)["logits"], expect(inputs)["logits"]
            assert np.abs(found - expected).max() <= 1.01 * np.diff(np.unique(expected)).min() + 1e-5


def test_what_depends_on_both_sizes_has_a_form(data: Data, tmp_path: Path) -> None:
    ctx = Context("net", "export.onnx", 7, tmp_path)
    model = with_any_width("grids", data, ctx, (3, "height", "width"))
    file = export_onnx(ExportConfig(num_samples=8), ctx, model, data)
    with file.predictor(1) as predict, model.predictor(1) as expect:
        for size in ((40, 40), (33, 18), (7, 101), (130, 131), (1, 3), (2, 1)):
            inputs = {"images": np.random.default_rng(0).normal(size=(2, 3, *size)).astype(np.float32)}
            np.testing.assert_allclose(predict(inputs)["logits"], expect(inputs)["logits"], atol=1e-5)


def test_what_has_no_form_of_any_size_is_named(data: Data, tmp_path: Path) -> None:
    ctx = Context("net", "export.onnx", 7, tmp_path)
    with pytest.raises(
        StageError, match=r"aten.adaptive_avg_pool2d to a size that depends on another one has no ONNX form \(.*// 2"
    ):
        export_onnx(ExportConfig(num_samples=8), ctx, with_any_width("halved", data, ctx), data)


@builder
def one_layer() -> nn.Module:
    return nn.Conv2d(3, 3, 1)


def test_a_file_that_is_wrong_for_other_sizes_alone_is_found(data: Data, tmp_path: Path) -> None:
    """It doubles what it returns for pictures that are not 32 high."""
    ctx = Context("net", "export.onnx", 7, tmp_path)
    model = Model.from_module(Recipe(FunctionRef.to(one_layer), data.info.signature), one_layer())
    model = dynamic_shapes(DynamicShapesConfig(inputs={"images": [3, "height", "width"]}), ctx, model)
    file = export_onnx(ExportConfig(num_samples=8), ctx, model, data)
    content = onnx.load(file.path)
    content.graph.node[-1].output[0] = "right"
    for name, value in (("usual", [32]), ("one", [1.0]), ("two", [2.0])):
        kind = TensorProto.INT64 if name == "usual" else TensorProto.FLOAT
        content.graph.initializer.append(helper.make_tensor(name, kind, [1], value))
    content.graph.node.extend(
        [
            helper.make_node("Shape", ["images"], ["height"], start=2, end=3),
            helper.make_node("Equal", ["height", "usual"], ["is_usual"]),
            helper.make_node("Where", ["is_usual", "one", "two"], ["factor"]),
            helper.make_node("Mul", ["right", "factor"], ["logits"]),
        ]
    )
    onnx.save(content, file.path)
    exported, samples = Exported(file, "ONNX file"), ComparedSamples(data, "test", 8, 7)
    with pytest.raises(StageError, match=r"^for samples of another size, images \(3, 23, 35\): ONNX file and torch"):
        check_other_sizes(ctx, exported, model, samples)
