"""Activations that are written out become the function of torch that they are, and nothing else does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ptpipe_quant.trace import trace_network
from ptpipe_torch.int8.tracer import SOURCE_LINE

from ...signatures import pictures
from .spellings import INPUT_SHAPE_CHW, Net, conv, logits

Step = Callable[[torch.Tensor], torch.Tensor]


def gpt2(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def bloom(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def with_a_constant(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / math.pi)) * (x + 0.044715 * x**3)))


def with_erf(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def with_few_digits(x: torch.Tensor) -> torch.Tensor:
    return x.mul(x.div(1.41421).erf() + 1.0).div(2.0)


def divided_last(x: torch.Tensor) -> torch.Tensor:
    return x * F.relu6(x + 3.0, inplace=True) / 6.0


def clamped(x: torch.Tensor) -> torch.Tensor:
    return (x + 3).clamp(0, 6).div(6) * x


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * x


def with_log1p(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(torch.log1p(torch.exp(x)))


def largest(x: torch.Tensor) -> torch.Tensor:
    return torch.max(0.1 * x, x)


def chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.2 * x)


def in_halves(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + 0.3 * x.clamp(max=0)


def subtracted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) - 0.25 * torch.relu(-x)


def gate(x: torch.Tensor) -> torch.Tensor:
    return F.relu6(x + 3) / 6


TARGETS: dict[Step, set[Any]] = {
    **{step: {F.gelu} for step in (gpt2, bloom, with_a_constant, with_erf, with_few_digits)},
    **{step: {nn.Hardswish} for step in (divided_last, clamped)},
    **{step: {nn.LeakyReLU} for step in (largest, chosen, in_halves, subtracted)},
    with_log1p: {F.mish},
    gate: {F.hardsigmoid},
    gated: {torch.sigmoid, torch.mul},  # the int8 form of SiLU
}


class Hswish(nn.Module):
    """As many MobileNetV3 write it."""

    def __init__(self) -> None:
        super().__init__()
        self.relu6 = nn.ReLU6(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.relu6(x + 3) / 6


def between_layers(step: Step, **layers: nn.Module) -> Net:
    torch.manual_seed(0)
    return Net(lambda n, x: logits(n, n.conv(step(n.stem(x)))), conv=conv(), **layers).eval()


def operators(network: nn.Module, route: str = "fx") -> set[Any]:
    """Return the functions, and the types of the layers, between the two convolutions."""
    graph = trace_network(copy.deepcopy(network), pictures(INPUT_SHAPE_CHW), route=route).graph
    x = 4 * torch.randn(2, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(graph(x), network(x), rtol=1e-4, atol=1e-5)
    nodes = list(graph.graph.nodes)
    assert all(SOURCE_LINE in node.meta for node in nodes if node.target is F.gelu)
    first, last = (next(n for n in nodes if n.target == name) for name in ("stem", "conv"))
    inside = nodes[nodes.index(first) + 1 : nodes.index(last)]
    return {type(graph.get_submodule(n.target)) if n.op == "call_module" else n.target for n in inside}


@pytest.mark.parametrize("step", TARGETS)
def test_a_spelling_is_the_function(step: Step) -> None:
    assert operators(between_layers(step)) == TARGETS[step]


@pytest.mark.parametrize("step", [gpt2, with_erf, divided_last, largest])
def test_they_are_found_in_an_exported_graph(step: Step) -> None:
    assert operators(between_layers(step), "export") == TARGETS[step]


def test_a_layer_of_its_own() -> None:
    network = between_layers(lambda x: x)
    network.stem = nn.Sequential(network.stem, Hswish())
    graph = trace_network(network.eval(), pictures(INPUT_SHAPE_CHW)).graph
    assert any(isinstance(layer, nn.Hardswish) for layer in graph.modules())
    assert not any(isinstance(layer, nn.ReLU6) for layer in graph.modules())


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x * torch.tanh(x),
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978 * (x + 0.05 * x**3))),
        lambda x: x * F.relu6(x + 3.01) / 6,
        lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
        lambda x: torch.max(1.5 * x, x),
        lambda x: torch.max(x, 1).values.unsqueeze(1) * torch.sigmoid(x),
    ],
)
def test_others_stay(step: Step) -> None:
    found = operators(between_layers(step))
    assert found.isdisjoint({F.gelu, F.hardsigmoid, F.mish, F.silu, nn.Hardswish, nn.LeakyReLU})
    assert len(found) > 1


def test_a_trained_number_is_no_constant() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(self.scale * x) + 0

    network = between_layers(lambda x: x)
    network.stem = nn.Sequential(network.stem, Scaled())
    graph = trace_network(network.eval(), pictures(INPUT_SHAPE_CHW)).graph
    assert any(node.op == "get_attr" and node.target == "stem.1.scale" for node in graph.graph.nodes)


def test_what_is_read_elsewhere_stays() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        bent = torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
        return 0.5 * x * (1.0 + bent) + bent

    assert {F.gelu, torch.tanh} <= operators(between_layers(step))


@given(slope=st.floats(0.001, 0.9), scale=st.floats(0.1, 5))
def test_leaky_relu_of_any_slope_of_what_is_computed(slope: float, scale: float) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        scaled = x * scale - 1
        return torch.maximum(slope * scaled, scaled)

    assert nn.LeakyReLU in operators(between_layers(step))
