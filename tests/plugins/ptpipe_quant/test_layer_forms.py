"""Layers whose weights are computed, and batch norms that can't be folded."""

from __future__ import annotations

import warnings

from torch import nn

from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import builder

from .conftest import BACKENDS, NUM_CLASSES, make_model


def weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch prefers the parametrization
        return nn.utils.weight_norm(layer)


@builder
def with_weight_norm() -> nn.Module:
    """A convolution whose weights are a direction and a length."""
    return nn.Sequential(weight_norm(nn.Conv2d(1, 4, 8)), nn.ReLU(), nn.Flatten(), nn.Linear(4, NUM_CLASSES))


def test_qat_reports_that_it_trains_the_weights_themselves(ctx, events) -> None:
    prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(with_weight_norm))
    assert any("the weights of 0 are computed from other parameters" in str(event) for event in events)
