"""ReLU6 in int8: removed if redundant, else correct on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe.events import LogLine
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_quant.calibration import observed_tensors
from ptpipe_quant.transforms import prepare_static
from ptpipe_torch import builder

from ...signatures import stored_pictures
from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model


@builder
def clamped(*, shared: bool) -> nn.Module:
    """A convolution and ReLU6, whose input another branch uses too where `shared`."""
    return Clamped(shared=shared)


class Clamped(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.conv, self.relu6 = nn.Conv2d(1, 4, 3), nn.ReLU6()
        nn.init.normal_(self.conv.weight, std=4.0)  # so that much is cut away
        self.head = nn.Linear(4 * 36, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        y = self.relu6(x) + 0.1 * x if self.shared else self.relu6(x)
        logits_NK: torch.Tensor = self.head(y.flatten(1))
        return logits_NK


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", [True, False])
def test_relu6_on_every_backend(digits, ctx, shared, backend) -> None:
    model = make_model(clamped, shared=shared)
    expected_NK = logits_of(model, digits)
    config = PrepareConfig(backend=backend, observer="min_max")
    calibrated = calibrate(CalibrateConfig(), ctx, prepare(config, ctx, model), digits).model
    converted = convert(ConvertConfig(), ctx, calibrated)
    error = np.abs(logits_of(converted, digits) - expected_NK).max() / np.abs(expected_NK).max()
    assert error < 0.15  # elements in the wrong places would make it 1 and more
    operators = [node.target for node in converted.build().graph.nodes]
    assert ("relu6" in operators) is shared


@builder
def clamped_tanh() -> nn.Module:
    """A ReLU6 behind an operator whose int8 range is fixed, from -1 to 1."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.ReLU6(), nn.Flatten(), nn.Linear(4 * 36, NUM_CLASSES))


@pytest.mark.sampled(2)  # fbgemm and qnnpack
@pytest.mark.parametrize("backend", BACKENDS)
def test_relu6_behind_a_fixed_range_still_clamps(digits, ctx, backend) -> None:
    model = make_model(clamped_tanh)
    config = PrepareConfig(backend=backend, observer="min_max")
    calibrated = calibrate(CalibrateConfig(), ctx, prepare(config, ctx, model), digits).model
    expected_NK, found_NK = logits_of(model, digits), logits_of(convert(ConvertConfig(), ctx, calibrated), digits)
    assert np.sqrt(np.square(found_NK - expected_NK).mean()) < 0.1 * expected_NK.std()


class Joined(nn.Module):
    """A ReLU6 in front of a concatenation with a tensor of negative values, as its first or its second."""

    def __init__(self, *, clamped_first: bool) -> None:
        super().__init__()
        self.clamped_first = clamped_first
        self.one, self.two, self.relu6 = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), nn.ReLU6()
        self.head = nn.Linear(8 * 36, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.relu6(4 * self.one(x)), self.two(x) - 3]
        logits_NK: torch.Tensor = self.head(torch.cat(parts if self.clamped_first else parts[::-1], 1).flatten(1))
        return logits_NK


class Shift(nn.Module):
    """A layer without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.1))

    def forward(self) -> torch.Tensor:
        return self.value


class Normed(nn.Module):
    """A ReLU6 in front of an operator that stays float, whose negative output is reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu6, self.norm = nn.Conv2d(1, 4, 3), nn.ReLU6(), nn.InstanceNorm2d(4)
        self.points, self.head, self.shift = nn.Conv1d(4, 4, 1), nn.Linear(4 * 36, NUM_CLASSES), Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.relu6(self.conv(x))) + self.shift()
        logits_NK: torch.Tensor = self.head(self.points(x.reshape(x.shape[0], 4, -1)).flatten(1))
        return logits_NK


@builder
def joined(*, clamped_first: bool) -> nn.Module:
    return Joined(clamped_first=clamped_first)


@builder
def normed() -> nn.Module:
    return Normed()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", [(joined, {"clamped_first": True}), (joined, {"clamped_first": False}), (normed, {})])
def test_relu6_stays_where_its_range_is_shared_with_other_tensors(digits, ctx, model, backend) -> None:
    network, arguments = model
    float_model = make_model(network, **arguments)
    config = PrepareConfig(backend=backend, observer="min_max")
    calibrated = calibrate(CalibrateConfig(), ctx, prepare(config, ctx, float_model), digits).model
    expected_NK, found_NK = logits_of(float_model, digits), logits_of(convert(ConvertConfig(), ctx, calibrated), digits)
    assert np.sqrt(np.square(found_NK - expected_NK).mean()) < 0.1 * expected_NK.std()


def test_what_is_reshaped_behind_a_float_operator_has_a_range_of_its_own() -> None:
    prepared = make_model(normed).build()
    options = {"weights": "per_channel", "skip": (), "inputs": stored_pictures((1, 8, 8))}
    prepared = prepare_static(prepared, backend=BACKENDS[0], observer="min_max", calibrating=True, **options)
    with torch.no_grad():
        prepared(torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    ranges = {tensor.name: (tensor.observer.min_val, tensor.observer.max_val) for tensor in observed_tensors(prepared)}
    assert ranges["relu6"][0] == 0
    assert ranges["reshape"][0] < -0.5


class Scaled(nn.Module):
    """Branches that are scaled by next to nothing before they are added, as layer scale begins."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.full((4, 1, 1), 1e-7))
        self.head = nn.Linear(4 * 36, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.scale * self.conv(x)
        x = torch.relu(x + self.scale * self.conv(x))
        logits_NK: torch.Tensor = self.head(x.flatten(1))
        return logits_NK


@builder
def scaled() -> nn.Module:
    return Scaled()


@pytest.mark.parametrize("backend", BACKENDS)
def test_additions_of_any_scale(digits, ctx, events, backend) -> None:
    model = make_model(scaled)
    prepared = prepare(PrepareConfig(backend=backend, observer="min_max"), ctx, model)
    converted = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    expected_NK, found_NK = logits_of(model, digits), logits_of(converted, digits)
    assert np.sqrt(np.square(found_NK - expected_NK).mean()) < 0.05 * expected_NK.std()
    in_float = [event.text for event in events if isinstance(event, LogLine) and "in float32" in event.text]
    assert bool(in_float) is (backend == "qnnpack")
    assert all(line.startswith("add") and "qnnpack has no kernel" in line for line in in_float)
