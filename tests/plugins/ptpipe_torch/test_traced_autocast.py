"""A traced network switches autocast off where the network does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_torch.int8.exported import trace_by_export
from ptpipe_torch.int8.fx import trace
from ptpipe_torch.traced_autocast import has_autocast_regions, remove_autocast_regions

from ...signatures import pictures

INPUTS = pictures((3, 8, 8))
TRACERS = pytest.mark.parametrize("tracer", [trace, trace_by_export])


class Products(nn.Module):
    """Three products; the second is in float32."""

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        first = x @ x
        with torch.autocast(self.device_type or x.device.type, enabled=False):
            second = self.layer(x @ x)
        return first, second, second @ x


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            with torch.autocast("cpu", enabled=False):
                first = x @ x
            second = x @ x
        return first, second, x @ x


class Asking(nn.Module):
    """Switches it off where it is on, as some libraries do."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")):
            first = x @ x
        return first, x @ x


class InTheEnd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ x


class NothingInside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            pass
        return x @ x


def outputs_of(network: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        returned = network(x)
        assert torch.is_autocast_enabled("cpu")
    return list(returned) if isinstance(returned, tuple) else [returned]


@TRACERS
@pytest.mark.parametrize("build", [Products, lambda: Products("cpu"), Nested, InTheEnd, NothingInside])
def test_the_outputs_are_those_of_the_network(build: Callable[[], nn.Module], tracer: Any) -> None:
    torch.manual_seed(0)
    network, x = build().eval(), torch.randn(4, 3, 8, 8)
    graph, scopes = tracer(network, INPUTS)
    expected, given = outputs_of(network, x), outputs_of(graph, x)
    assert [value.dtype for value in given] == [value.dtype for value in expected]
    assert all(map(torch.equal, given, expected))
    assert scopes.keys() >= {node.name for node in graph.graph.nodes if node.op not in ("placeholder", "output")}


def test_a_network_that_asks_is_told_that_autocast_is_on() -> None:
    network, x = Asking(), torch.randn(4, 3, 8, 8)
    graph, _ = trace(network, INPUTS)
    assert [value.dtype for value in outputs_of(graph, x)] == [torch.float32, torch.bfloat16]
    assert all(map(torch.equal, outputs_of(graph, x), outputs_of(network, x)))


@TRACERS
def test_without_regions_it_is_always_on(tracer: Any) -> None:
    graph, _ = tracer(Products(), INPUTS)
    assert has_autocast_regions(graph.graph)
    remove_autocast_regions(graph.graph)
    graph.recompile()
    assert not has_autocast_regions(graph.graph)
    assert [value.dtype for value in outputs_of(graph, torch.randn(4, 3, 8, 8))] == [torch.bfloat16] * 3


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")
def test_a_region_of_another_device_changes_nothing() -> None:
    network, x = Products("cuda"), torch.randn(4, 3, 8, 8)
    graph, _ = trace(network, INPUTS)
    assert has_autocast_regions(graph.graph)
    assert [value.dtype for value in outputs_of(graph, x)] == [torch.bfloat16] * 3


def test_what_is_computed_while_it_is_traced_is_exact() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.full((8, 8), 1 / 3) @ torch.full((8, 8), 1 / 3)

    x = torch.zeros(1, 3, 8, 8)
    assert torch.equal(trace(Constant(), INPUTS)[0](x), Constant()(x))


@pytest.mark.parametrize("fails", [False, True])
def test_tracing_leaves_autocast_as_it_was(fails: bool) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return x.no_such_method() if fails else x @ x

    def state() -> list[Any]:
        types = ("cpu", "cuda")
        return [(torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_)) for type_ in types]

    before = state()
    try:
        trace(Failing(), INPUTS)
    except (TypeError, AttributeError):
        assert fails
    assert state() == before


def test_it_is_off_for_both_halves_of_a_training_step() -> None:
    """Autocast of a backward pass is that of its operators' forward pass."""
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    network = Products("cpu")
    graph, _ = trace(network, INPUTS)
    gradients = [
        torch.autograd.grad(sum(value.float().sum() for value in outputs_of(module, x)), x)[0]
        for module in (network, graph)
    ]
    assert torch.equal(*gradients)


def test_regions_are_no_dead_code() -> None:
    graph, _ = trace(InTheEnd(), INPUTS)
    graph.graph.eliminate_dead_code()
    assert has_autocast_regions(graph.graph)
