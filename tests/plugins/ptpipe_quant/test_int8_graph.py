"""ReLU6 in int8: removed if redundant, else correct on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import builder

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


@pytest.mark.parametrize("reduce_range", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_relu6_on_every_backend(digits, ctx, shared, reduce_range) -> None:
    model = make_model(clamped, shared=shared)
    expected_NK = logits_of(model, digits)
    for backend in BACKENDS:
        config = PrepareConfig(backend=backend, observer="min_max", reduce_range=reduce_range)
        calibrated = calibrate(CalibrateConfig(), ctx, prepare(config, ctx, model), digits).model
        converted = convert(ConvertConfig(), ctx, calibrated)
        error = np.abs(logits_of(converted, digits) - expected_NK).max() / np.abs(expected_NK).max()
        assert error < 0.15, backend  # elements in the wrong places would make it 1 and more
        operators = [node.target for node in converted.build().graph.nodes]
        assert ("relu6" in operators) is (shared or reduce_range)


@builder
def clamped_tanh() -> nn.Module:
    """A ReLU6 behind an operator whose int8 range is fixed, from -1 to 1."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.ReLU6(), nn.Flatten(), nn.Linear(4 * 36, NUM_CLASSES))


@pytest.mark.parametrize("backend", BACKENDS)
def test_relu6_behind_a_fixed_range_still_clamps(digits, ctx, backend) -> None:
    model = make_model(clamped_tanh)
    config = PrepareConfig(backend=backend, observer="min_max", reduce_range=False)
    calibrated = calibrate(CalibrateConfig(), ctx, prepare(config, ctx, model), digits).model
    expected_NK, found_NK = logits_of(model, digits), logits_of(convert(ConvertConfig(), ctx, calibrated), digits)
    assert np.sqrt(np.square(found_NK - expected_NK).mean()) < 0.1 * expected_NK.std()
