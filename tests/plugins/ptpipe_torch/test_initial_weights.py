from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ptpipe_torch.initial_weights import built_undrawn


class Projected(nn.Module):
    """Its random projection is no part of its state: whoever wrote it relies on the seed."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.layer = nn.Linear(3, 4)
        self.projection = torch.randn(4)


class Position(nn.Module):
    """As in torchvision's vision transformers: drawn before it becomes a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(1, 4).normal_(std=0.02))


class Frozen(nn.Module):
    """Its buffer is no part of its state either, and drawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.empty(4).normal_(), persistent=False)
        self.layer = nn.Linear(3, 4)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Linear(3, 4),
        lambda: nn.Conv2d(3, 4, 3),
        lambda: nn.LSTM(3, 4),
        lambda: nn.Embedding(3, 4),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        Position,
    ],
)
def test_random_parameters_become_zeros_and_nothing_is_drawn(layer: Callable[[], nn.Module]) -> None:
    before = torch.random.get_rng_state()
    network = built_undrawn(layer)
    assert torch.equal(torch.random.get_rng_state(), before)
    expected = layer()
    for (name, value), drawn in zip(network.named_parameters(), expected.parameters(), strict=True):
        is_constant = drawn.std(correction=0).item() == 0  # gains of 1, biases of 0
        assert torch.equal(value, drawn if is_constant else torch.zeros_like(drawn)), name
        assert value.requires_grad


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(3, 4)
        nn.init.normal_(self.layer.weight, generator=generator)
        nn.init.zeros_(self.layer.bias)
        self.projection = torch.randn(4, generator=generator)


@pytest.mark.parametrize("build", [lambda: Projected(None), lambda: Projected(7), Frozen, OwnGenerator])
def test_other_random_numbers_are_those_of_the_builder(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    network = built_undrawn(build)
    assert torch.equal(network.projection, expected.projection)  # type: ignore[arg-type, operator]
    assert torch.equal(network.layer.weight, expected.layer.weight)  # type: ignore[union-attr, arg-type]


def test_a_parameter_is_returned_as_by_torch() -> None:
    """Builders write `self.weight = nn.init.normal_(nn.Parameter(...))`."""

    def build() -> nn.Module:
        network = nn.Module()
        network.first = nn.init.normal_(nn.Parameter(torch.empty(2)))
        network.second = nn.init.xavier_normal_(nn.Parameter(torch.empty(2, 2)))
        return network

    assert sorted(name for name, _ in built_undrawn(build).named_parameters()) == ["first", "second"]


def test_a_builder_that_can_not_do_with_zeros_draws() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.register_buffer("inverse", torch.linalg.inv(layer.weight.detach()))
        return layer

    network = built_undrawn(build)
    assert network.inverse.isfinite().all()  # type: ignore[union-attr, operator]


def test_what_a_builder_raises_is_raised() -> None:
    def build() -> nn.Module:
        raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        built_undrawn(build)
