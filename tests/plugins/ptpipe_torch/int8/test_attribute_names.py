"""Networks whose attributes have names that Python or FX has a use for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant.trace import trace_network
from ptpipe_torch.int8.attribute_names import RESERVED, ReservedNameError

from ....signatures import pictures

INPUTS = pictures((4,))


class Heads(nn.Module):
    """Layers named by keywords, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"in": nn.Linear(4, 8), "class": nn.Linear(8, 3), "box": nn.Linear(8, 4)})
        self.register_parameter("lambda", nn.Parameter(torch.tensor(0.5)))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers["in"](x).relu() * getattr(self, "lambda").sigmoid()
        return self.layers["class"](x), self.layers["box"](x)


class Named(nn.Module):
    """A layer and a buffer of these names."""

    def __init__(self, layer: str, buffer: str) -> None:
        super().__init__()
        self.add_module(layer, nn.Linear(4, 4))
        self.register_buffer(buffer, torch.ones(4))
        self.names = layer, buffer

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, self.names[0])(x) * getattr(self, self.names[1])


@pytest.mark.parametrize("route", ["fx", "export"])
def test_keywords(route) -> None:
    torch.manual_seed(0)
    network, x = Heads().eval(), torch.randn(3, 4)
    graph = trace_network(copy.deepcopy(network), INPUTS, route=route).graph
    for found, expected in zip(graph(x), network(x), strict=True):
        torch.testing.assert_close(found, expected)
    assert 'getattr(self.layers, "class")' in graph.code or route == "export"


@pytest.mark.parametrize("route", ["fx", "export"])
@pytest.mark.parametrize("names", [("meta", "ones"), ("graph", "ones"), ("print_readable", "ones"), ("layer", "code")])
def test_names_of_torch_fx_are_refused(route, names) -> None:
    (reserved,) = {*names} & RESERVED
    with pytest.raises(ReservedNameError, match=f"self.{reserved} of the network .* to self.{reserved}_ for example"):
        trace_network(Named(*names), INPUTS, route=route)


def test_other_errors_of_such_a_network_are_its_own() -> None:
    network = Named("layer", "ones")
    network.add_module("meta", nn.Linear(2, 2))  # not called
    trace_network(network, INPUTS)
    network.names = ("layer", "missing")
    with pytest.raises(StageError, match="missing"):
        trace_network(network, INPUTS)
