"""Networks as graphs: what is rewritten, what is left float, and what can't be traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe_quant.trace import float_names, layers_to_quantize, trace_network

from .conftest import Mixed, small_net


def operators(graph: torch.fx.GraphModule) -> list[object]:
    return [
        type(graph.get_submodule(node.target)) if node.op == "call_module" else node.target
        for node in graph.graph.nodes
        if node.op not in ("placeholder", "output")
    ]


class Functions(nn.Module):
    """Every way to write ReLU, and dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.drop = nn.Dropout2d(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.relu(x) - 1)
        x = torch.relu(x - 1)
        x = F.relu(x - 1, inplace=True)
        x = torch.relu_(x - 1)
        x = F.relu(input=x - 1)
        x = (x - 1).relu()
        x = self.drop((x - 1).relu_())
        return F.dropout(x, 0.4, self.training)


def test_every_relu_becomes_a_module_of_its_own() -> None:
    torch.manual_seed(0)
    network = trace_network(Functions(), (4, 5, 5))
    graph, scopes = network.graph, network.scopes
    relus = [node for node in graph.graph.nodes if "elu" in str(node.target) or "ReLU" in str(node.target)]
    assert len(relus) == 8
    assert all(type(graph.get_submodule(node.target)) is nn.ReLU for node in relus)
    assert len({id(graph.get_submodule(node.target)) for node in relus}) == 8
    x = 20 * torch.randn(3, 4, 5, 5)
    assert torch.equal(graph(x), Functions().eval()(x))
    assert {node.name for node in graph.graph.nodes if node.op != "output"} <= set(scopes)


def test_dropout_is_kept_aside() -> None:
    graph = trace_network(Functions(), (4, 5, 5)).graph
    kept = [layer.__dict__["_dropout_for_training"] for layer in graph.modules() if type(layer) is nn.Identity]
    assert [(type(layer), layer.p) for layer in kept] == [(nn.Dropout2d, 0.3), (nn.Dropout, 0.4)]
    assert not any(isinstance(layer, nn.Dropout | nn.Dropout2d) for layer in graph.modules())


def test_dropout_that_never_stops_is_left_alone() -> None:
    class Restless(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5)  # always training: so its author wants it

    assert operators(trace_network(Restless(), (1, 8, 8)).graph) == [F.dropout]


def test_flatten_becomes_a_function() -> None:
    graph = trace_network(small_net().eval(), (1, 8, 8)).graph
    assert torch.flatten in operators(graph)
    assert nn.Flatten not in operators(graph)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = self.conv(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 1, 1)
        self.gate = Branching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.first(x))


def test_the_line_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(StageError) as caught:
        trace_network(Outer(), (1, 8, 8))
    message = str(caught.value)
    assert "test_trace.py:" in message
    assert "`if x.sum() > 0:`" in message
    assert "skip: [gate]" in message
    assert "\n" not in message


def test_what_is_left_float_need_not_be_traceable() -> None:
    graph = trace_network(Outer(), (1, 8, 8), leaves=["gate"]).graph
    assert operators(graph) == [nn.Conv2d, Branching]


class TestSkip:
    def test_by_name_by_pattern_and_by_type(self) -> None:
        net = Mixed()
        assert float_names(net, ["head"]) == ["head"]
        assert float_names(net, ["stem.*"]) == ["stem.0", "stem.1", "stem.2"]
        assert float_names(net, ["Linear"]) == ["hidden", "head"]
        assert float_names(net, ["Conv?d", "block"]) == ["stem.0", "wide.0", "left", "right", "block"]
        assert float_names(net, []) == []

    @pytest.mark.parametrize(
        ("pattern", "hint"), [("haed", "did you mean 'head'"), ("Liner", "did you mean 'Linear'"), ("zzz", "'zzz'$")]
    )
    def test_what_fits_nothing_is_refused_with_the_nearest(self, pattern, hint) -> None:
        with pytest.raises(StageError, match=hint):
            float_names(Mixed(), ["head", pattern])

    def test_layers_of_a_type(self) -> None:
        assert layers_to_quantize(Mixed(), [], nn.Linear) == ["hidden", "head"]
        assert layers_to_quantize(Mixed(), ["head", "wide"], nn.Linear, nn.Conv2d) == [
            "stem.0", "block.conv", "left", "right", "hidden",
        ]  # fmt: skip
