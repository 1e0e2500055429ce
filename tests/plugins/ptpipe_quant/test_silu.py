"""SiLU behind int8 layers is a product with a sigmoid; behind float ones it stays one operator."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ptpipe_quant.trace import trace_network

from ...signatures import pictures


class Function(nn.Module):
    """A layer, then SiLU as a function."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.layer, self.inplace = nn.Conv2d(3, 4, 3), inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.layer(x), inplace=self.inplace)


def silu_operators(network: nn.Module, skip: Sequence[str] = ()) -> list[str]:
    """The operators that SiLU was written as; checks that the function is the same."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(43))
    with torch.no_grad():
        expected = network.eval()(x)
        traced = trace_network(network, pictures((3, 8, 8)), skip)
        torch.testing.assert_close(traced.graph(x), expected)
    names = {torch.sigmoid: "sigmoid", torch.mul: "mul", nn.functional.silu: "silu"}
    found = [node for node in traced.graph.graph.nodes if node.target in names]
    assert all(node.name in traced.scopes for node in found)
    layers = [type(part).__name__ for part in traced.graph.modules()]
    return [names[node.target] for node in found] + [name for name in layers if name == "SiLU"]


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU()),
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU(inplace=True)),
        nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.SiLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.SiLU()),
        Function(inplace=False),
        Function(inplace=True),
    ],
)
def test_behind_an_int8_layer(network: nn.Module) -> None:
    assert silu_operators(network) == ["sigmoid", "mul"]


@pytest.mark.parametrize(
    ("network", "skip"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU()), ()),
        (nn.Sequential(nn.SiLU(), nn.Conv2d(3, 4, 3)), ()),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU()), ("0",)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU()), ("1",)),
    ],
    ids=["behind a float norm", "of the input", "behind a layer left float", "left float itself"],
)
def test_elsewhere(network: nn.Module, skip: Sequence[str]) -> None:
    assert silu_operators(network, skip) == ["SiLU"]
