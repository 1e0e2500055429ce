"""Layers whose weights are computed, and batch norms that can't be folded."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_quant.layer_forms import reparametrized_layers, store_weights
from ptpipe_torch import builder

from .conftest import BACKENDS, NUM_CLASSES, make_model


def weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch prefers the parametrization
        return nn.utils.weight_norm(layer)


@builder
def with_weight_norm() -> nn.Module:
    """A convolution whose weights are a direction and a length."""
    return nn.Sequential(weight_norm(nn.Conv2d(1, 4, 8)), nn.ReLU(), nn.Flatten(), nn.Linear(4, NUM_CLASSES))


@pytest.mark.parametrize("computed", [weight_norm, parametrizations.weight_norm, spectral_norm])
def test_computed_weights_become_parameters_of_copies_too(computed) -> None:
    with torch.no_grad():  # else torch refuses to copy the old weight norm
        layer = computed(nn.Linear(4, 3))
    network = nn.Sequential(layer, nn.Linear(3, 4), copy.deepcopy(layer)).eval()
    x = torch.randn(5, 4)
    expected = network(x)
    assert reparametrized_layers(network) == ["0", "2"]
    store_weights(network)
    assert reparametrized_layers(network) == []
    assert [type(layer) for layer in network] == [nn.Linear] * 3  # the types that FX quantizes
    assert {name for name, _ in network.named_parameters()} == {
        f"{index}.{name}" for index in range(3) for name in ("weight", "bias")
    }
    torch.testing.assert_close(network(x), expected)
    network.load_state_dict(network.state_dict())


def test_qat_reports_that_it_trains_the_weights_themselves(ctx, events) -> None:
    prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(with_weight_norm))
    assert any("the weights of 0 are computed from other parameters" in str(event) for event in events)
