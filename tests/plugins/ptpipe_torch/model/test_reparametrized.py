"""Layers whose weights are computed become plain ones."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from ptpipe_torch.model.reparametrized import remove_parametrizations, reparametrized_layers


def weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch prefers the parametrization
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize("computed", [weight_norm, parametrizations.weight_norm, spectral_norm])
def test_computed_weights_become_parameters_of_copies_too(computed) -> None:
    with torch.no_grad():  # else torch refuses to copy the old weight norm
        layer = computed(nn.Linear(4, 3))
    network = nn.Sequential(layer, nn.Linear(3, 4), copy.deepcopy(layer)).eval()
    x = torch.randn(5, 4)
    expected = network(x)
    assert reparametrized_layers(network) == ["0", "2"]
    remove_parametrizations(network)
    assert reparametrized_layers(network) == []
    assert [type(layer) for layer in network] == [nn.Linear] * 3  # the types that FX quantizes
    assert {name for name, _ in network.named_parameters()} == {
        f"{index}.{name}" for index in range(3) for name in ("weight", "bias")
    }
    torch.testing.assert_close(network(x), expected)
    network.load_state_dict(network.state_dict())


def test_masked_weights_become_parameters_with_zeros() -> None:
    layer = nn.Linear(4, 3)
    network = nn.Sequential(layer, nn.Linear(3, 4)).eval()
    prune.l1_unstructured(layer, "weight", 0.25)
    prune.random_structured(layer, "weight", 1, dim=0)  # of two masks, torch keeps both in a container
    x = torch.randn(5, 4)
    expected = network(x)
    assert remove_parametrizations(network) == ["0.weight"]
    assert {name for name, _ in network.named_parameters()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not layer._forward_pre_hooks
    assert int((layer.weight == 0).sum()) >= 4
    torch.testing.assert_close(network(x), expected)
