"""Handwritten digits, networks of the usual shapes, and int8 models of them made with torch alone.

Shape legend: N samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.ao import quantization as ao
from torch.ao.quantization import quantize_fx

from ptpipe import Context
from ptpipe.events import Event, Metric
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_torch import ArrayColumn, Data, FunctionRef, Model, OnnxFile, Recipe
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.model.exact_session import may_saturate
from ptpipe_torch.model.function_ref import builder, transform
from ptpipe_torch.runtime import seeded, torch_threads

from ...datasets import image_info, image_split
from ...signatures import classifier

SHAPE_CHW = (1, 16, 16)
NUM_EPOCHS = 8


def _unit(channels_in: int, channels_out: int, activation: type[nn.Module], **options: int) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels_out, **{"kernel_size": 3, "padding": 1, "bias": False, **options})
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out), activation())


class Residual(nn.Module):
    """The mean is one of 7x7 values, as networks of 224x224 images have it.

    The mean of an even number of integers is often halfway between two, and which of them torch takes is chance: it
    multiplies by a rounded scale and divides by it again. Of an odd number it never is, and there is one result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(1, 8, nn.ReLU, padding=0)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.inner = nn.Sequential(_unit(8, 8, nn.ReLU), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)
        self.mean = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Linear(8, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(images_NCHW))
        x = self.relu(self.inner(x) + x)
        return self.head(torch.flatten(self.mean(x), 1))


class Mobile(nn.Module):
    """ReLU6, a depthwise convolution, hard swish, concatenation, a mean (of 7x7, as above), dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(1, 8, nn.ReLU6, stride=2, padding=0)
        self.depthwise = _unit(8, 8, nn.ReLU6, groups=8)
        self.swish = _unit(8, 8, nn.Hardswish)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.stem(images_NCHW)
        x = torch.cat([self.depthwise(x), self.swish(x)], dim=1)
        return self.head(self.dropout(x.mean([2, 3])))


class Rows(nn.Module):
    """Linear layers over three axes, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(16, 12)
        self.wide = nn.Sequential(nn.Linear(12, 2048), nn.ReLU(), nn.Linear(2048, 12))
        self.bare = nn.Linear(12, 12, bias=False)
        self.head = nn.Linear(16 * 12, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        rows_NHC = torch.relu(self.wide(torch.relu(self.rows(images_NCHW.squeeze(1)))))
        return self.head(torch.relu(self.bare(rows_NHC)).flatten(1))


class Attention(nn.Module):
    """Rows attend to rows: linear layers over three axes and two products of activations, in two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 12) for _ in range(3))
        self.head = nn.Linear(16 * 12, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        rows_NLI = images_NCHW.squeeze(1)
        query, key, value = (
            layer(rows_NLI).view(-1, 16, 2, 6).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights_NHLL = torch.softmax(torch.matmul(query, key.transpose(-2, -1)), dim=-1)
        attended_NLHd = torch.matmul(weights_NHLL, value).transpose(1, 2)
        return self.head(attended_NLHd.flatten(1))


NARROW = may_saturate()
"""Whether weights need 7 bits here, so that sums don't saturate."""


@builder
def network(name: str) -> nn.Module:
    if name == "residual":
        return Residual()
    if name == "mobile":
        return Mobile()
    if name == "depthwise":
        units = _unit(1, 24, nn.ReLU, stride=2), _unit(24, 24, nn.ReLU, kernel_size=5, padding=2, groups=24)
        return nn.Sequential(*units, nn.Flatten(), nn.Linear(24 * 64, 10))
    if name == "repeated":  # two outputs for each channel; 24 are padded to 32 in the file
        units = _unit(12, 24, nn.ReLU, kernel_size=5, padding=2, groups=12), _unit(24, 48, nn.ReLU, groups=24)
        return nn.Sequential(_unit(1, 12, nn.ReLU, stride=2), *units, nn.Flatten(), nn.Linear(48 * 64, 10))
    if name == "volumes":
        first = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU())
        second = nn.Sequential(nn.Conv3d(8, 12, (2, 3, 3), (2, 2, 1), (0, 1, 1), dilation=(1, 1, 2)), nn.ReLU())
        return nn.Sequential(nn.Unflatten(2, (4, 4)), first, second, nn.Flatten(), nn.Linear(12 * 2 * 2 * 14, 10))
    if name == "rows":
        return Rows()
    if name == "attention":
        return Attention()
    if name == "reflect":
        conv = nn.Conv2d(1, 8, 3, 2, 1, padding_mode="reflect")
        return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 10))
    assert name == "cnn"
    convolutions = [_unit(1, 8, nn.ReLU), nn.MaxPool2d(2), _unit(8, 16, nn.ReLU), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(deprecated|will be removed)", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*quantized tensor creation functions", UserWarning)
        warnings.filterwarnings("ignore", ".*oneDNN backend with reduce_range of false", UserWarning)
        yield


@transform
def with_observers(module: nn.Module, backend: str, qat: bool, narrow: bool, skip: str) -> nn.Module:
    """FX-prepare: weights as the backend has them, from -64 to 64 if `narrow`; the submodule `skip` stays float."""
    weight = ao.default_weight_observer if backend == "qnnpack" else ao.default_per_channel_weight_observer
    activation = ao.MinMaxObserver.with_args(quant_min=0, quant_max=255, dtype=torch.quint8)
    if qat:
        weight = ao.default_weight_fake_quant if backend == "qnnpack" else ao.default_per_channel_weight_fake_quant
        activation = ao.FakeQuantize.with_args(
            observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
        )
    if narrow:
        weight = weight.with_args(quant_min=-64, quant_max=64)
    qconfig = ao.QConfig(activation, weight)
    images_NCHW = torch.zeros(1, *SHAPE_CHW)
    with quietly():
        mapping = (ao.get_default_qat_qconfig_mapping if qat else ao.get_default_qconfig_mapping)(backend)
        prepare = quantize_fx.prepare_qat_fx if qat else quantize_fx.prepare_fx
        mapping = mapping.set_global(qconfig).set_module_name(skip, None)
        return prepare(module.train(qat), mapping, (images_NCHW,))


@transform
def to_int8(module: nn.Module) -> nn.Module:
    with quietly():
        return quantize_fx.convert_fx(module.eval())


@transform
def to_dynamic(module: nn.Module, per_channel: bool) -> nn.Module:
    qconfig = ao.per_channel_dynamic_qconfig if per_channel else ao.default_dynamic_qconfig
    with quietly():
        return ao.quantize_dynamic(module, {nn.Linear: qconfig}, inplace=True)


@pytest.fixture(scope="session")
def digits() -> Data:
    """8x8 digits, each pixel twice as wide and high."""
    bunch = load_digits()
    pixels_NHWC = np.kron(bunch.images * 15.9375, np.ones((2, 2))).astype(np.uint8)[..., None]
    parts = {"test": slice(0, 300), "calibration": slice(300, 600), "train": slice(600, None)}
    splits = {
        name: image_split(
            np.array([f"{name}/{i:05d}" for i in range(len(bunch.target[part]))]),
            bunch.target[part].astype(np.int64),
            ArrayColumn(np.ascontiguousarray(pixels_NHWC[part])),
        )
        for name, part in parts.items()
    }
    return Data(image_info("digits", tuple("0123456789"), SHAPE_CHW, (0.31,), (0.38,)), splits)


def coarse(values: torch.Tensor) -> torch.Tensor:
    """Round floats to 12 significant bits, so that the last bits of the sums they come from decide nothing."""
    if not values.is_floating_point():
        return values
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.round(mantissa * 4096) / 4096, exponent).to(values.dtype)


@contextmanager
def reproducibly() -> Iterator[None]:
    """Draw from one stream of random numbers, whatever ran before (a dropout draws at every step), on one thread."""
    with seeded(0), torch_threads(1):
        yield


@pytest.fixture(scope="session")
def float_model(digits: Data) -> Callable[[str], Model]:
    """Give the network of that name after a few steps of training.

    It is the same to the bit whatever ran before, with vectors of AVX2 as of AVX-512: sums of float32 depend on
    these, and training makes much of little. Hence training in float64, and the coarse outcome of it.
    """
    known: dict[str, Model] = {}

    def make(name: str) -> Model:
        if name not in known:
            with reproducibly():
                module = network(name).double().train()
                optimizer = torch.optim.AdamW(module.parameters(), 0.01)
                for batch in (batch for _ in range(NUM_EPOCHS) for batch in digits.batches("train", batch_size=64)):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(
                        module(batch.inputs["images"].double()), batch.targets["labels"]
                    ).backward()
                    optimizer.step()
            module.load_state_dict({key: coarse(values) for key, values in module.float().state_dict().items()})
            known[name] = Model.from_module(
                Recipe(FunctionRef.to(network, name=name), classifier(SHAPE_CHW, 10)), module
            )
        return known[name]

    return make


@pytest.fixture(scope="session")
def int8_model(float_model: Callable[[str], Model], digits: Data) -> Callable[..., Model]:
    """Give a static (or QAT) int8 model whose observers saw the calibration samples; the same to the bit, as above."""

    def make(
        name: str, backend: str = "onednn", *, qat: bool = False, narrow: bool = False, skip: str = "none"
    ) -> Model:
        module = float_model(name).build()
        part = FunctionRef.to(with_observers, backend=backend, qat=qat, narrow=narrow, skip=skip)
        with quantized_engine(backend), reproducibly():
            prepared = part.resolve("transform")(module, **part.arguments).double()
            for observer in prepared.modules():
                if isinstance(observer, ao.ObserverBase | ao.FakeQuantizeBase):
                    observer.float()  # torch has no scales of float64
            prepared.train(qat)
            with torch.no_grad():
                for batch in digits.batches("calibration"):
                    prepared(batch.inputs["images"].double())
        tensors = {key: coarse(values) for key, values in prepared.float().state_dict().items()}
        prepared.load_state_dict(tensors)
        recipe = Recipe(
            FunctionRef.to(network, name=name), classifier(SHAPE_CHW, 10), (part,), (FunctionRef.to(to_int8),), backend
        )
        return Model.from_module(recipe, prepared)

    return make


@pytest.fixture(scope="session")
def dynamic_model(float_model: Callable[[str], Model]) -> Callable[..., Model]:
    def make(name: str, backend: str, *, per_channel: bool) -> Model:
        parts = (FunctionRef.to(to_dynamic, per_channel=per_channel),)
        return float_model(name).with_recipe(convert=parts, backend=backend)

    return make


class RecordedEvents(list[Event]):
    """Events of a stage."""

    @property
    def metrics(self) -> dict[str, object]:
        return {event.name: event.value for event in self if isinstance(event, Metric)}


@dataclass(frozen=True)
class Exported:
    """A model, its file, and what its export reported."""

    model: Model
    file: OnnxFile
    events: RecordedEvents


@pytest.fixture(scope="session")
def exported(
    float_model: Callable[[str], Model],
    int8_model: Callable[..., Model],
    digits: Data,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Exported]:
    """Export `float_model(name)`, or `int8_model` with these arguments: once for all tests that read the file."""
    known: dict[tuple[object, ...], Exported] = {}

    def make(name: str, backend: str | None = None, *, qat: bool = False, narrow: bool = False) -> Exported:
        key = name, backend, qat, narrow
        if key not in known:
            model = float_model(name) if backend is None else int8_model(name, backend, qat=qat, narrow=narrow)
            events = RecordedEvents()
            ctx = Context("onnx", "export.onnx", 7, tmp_path_factory.mktemp("exported"), _tell=events.append)
            file = export_onnx(ExportConfig(num_samples=200), ctx, model, digits)
            known[key] = Exported(model, file, events)
        return known[key]

    return make


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture
def run_export(tmp_path: Path, digits: Data, events: RecordedEvents) -> Callable[..., OnnxFile]:
    """Run the stage on the digits."""

    def run(model: Model, data: Data = digits, **options: object) -> OnnxFile:
        ctx = Context("onnx", "export.onnx", 7, tmp_path, _tell=events.append)
        return export_onnx(ExportConfig(**{"num_samples": 200, **options}), ctx, model, data)

    return run


@pytest.fixture(scope="session")
def run_onnx() -> Callable[..., np.ndarray]:
    """Run a file or a serialized model, by default without any of ONNX Runtime's own optimizations."""

    def run(model: Path | bytes, images_NCHW: np.ndarray, *, optimize: bool = False) -> np.ndarray:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.x64quantprecision", "1")  # no sum saturates, without VNNI either
        content = model if isinstance(model, bytes) else str(model)
        session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return session.run(None, {session.get_inputs()[0].name: images_NCHW})[0]

    return run
