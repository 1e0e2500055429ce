"""Networks that count images by dividing sizes, for batches of any size.

Shape legend: N images, H height, W width, C channels.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_torch.int8.tracing import trace_graph
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.torch_export import export_program
from ptpipe_torch.whole_quotients import own_int, symbolic_quotients

SIZE, WINDOW, CHANNELS = 8, 4, 6
INPUTS = (TensorSpec("images", "float32", ("batch", SIZE, SIZE, CHANNELS)),)


class Windows(nn.Module):
    """A layer on windows, as the original code of Swin has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CHANNELS, CHANNELS)

    def num_images(self, windows: torch.Tensor) -> Any:
        return int(windows.shape[0] / (SIZE * SIZE / WINDOW / WINDOW))

    def forward(self, x_NHWC: torch.Tensor) -> torch.Tensor:
        num_rows = SIZE // WINDOW
        x = x_NHWC.view(-1, num_rows, WINDOW, num_rows, WINDOW, CHANNELS).permute(0, 1, 3, 2, 4, 5)
        x = self.layer(x.reshape(-1, WINDOW * WINDOW, CHANNELS))
        assert isinstance(WINDOW, int)
        x = x.view(self.num_images(x), num_rows, num_rows, WINDOW, WINDOW, -1)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(x.shape[0], SIZE, SIZE, -1)


class Halves(Windows):
    """Divides twice: a quotient of a quotient is not known to be whole."""

    def num_images(self, windows: torch.Tensor) -> Any:
        return int(windows.shape[0] / 2 / 2)


class WholeAlready(Windows):
    def num_images(self, windows: torch.Tensor) -> Any:
        return int(windows.shape[0] // 4)


class Fraction(Windows):
    """Divides by no whole number."""

    def num_images(self, windows: torch.Tensor) -> Any:
        return int(windows.shape[0] * 0.25)


@pytest.mark.parametrize("network", [Windows(), WholeAlready()])
def test_a_graph_takes_batches_of_any_size(network) -> None:
    graph = GraphModule(network, trace_graph(network, INPUTS, ())[0])
    for num_images in (1, 2, 5):
        x = torch.randn(num_images, SIZE, SIZE, CHANNELS)
        assert torch.equal(graph(x), network(x))


@pytest.mark.parametrize("network", [Windows(), WholeAlready()])
@pytest.mark.parametrize("is_traced", [False, True])
def test_an_exported_network_takes_batches_of_any_size(network, is_traced) -> None:
    module = GraphModule(network, trace_graph(network, INPUTS, ())[0]) if is_traced else network
    x = torch.randn(2, SIZE, SIZE, CHANNELS)
    program = export_program(module, (x,), ({0: torch.export.Dim("batch")},))
    for num_images in (2, 5):
        x = torch.randn(num_images, SIZE, SIZE, CHANNELS)
        assert torch.equal(program.module()(x), network(x))


@pytest.mark.parametrize("network", [Halves(), Fraction()])
def test_what_is_not_known_to_be_whole_is_refused(network) -> None:
    with pytest.raises(TypeError, match="depends on the batch size"):
        trace_graph(network, INPUTS, ())
    with pytest.raises(Exception, match="batch"):
        export_program(network, (torch.randn(2, SIZE, SIZE, CHANNELS),), ({0: torch.export.Dim("batch")},))


def test_int_is_what_it_was_but_for_such_values() -> None:
    own, divide = vars(sys.modules[__name__]), torch.SymInt.__truediv__
    with symbolic_quotients(Windows()):
        replaced: Any = own["int"]
        assert replaced is not builtins.int
        assert (replaced("12", 8), replaced(2.7), replaced()) == (10, 2, 0)
        assert isinstance(3, replaced) and not isinstance(3.0, replaced)
        assert issubclass(bool, replaced) and not issubclass(float, replaced)
        assert replaced.from_bytes(b"\x01") == 1
        assert builtins.int in (replaced, float)
    assert "int" not in own
    assert torch.SymInt.__truediv__ is divide


def test_a_name_of_the_users_stays(monkeypatch) -> None:
    monkeypatch.setitem(vars(sys.modules[__name__]), "int", float)
    with own_int(Windows(), lambda value: value):
        assert vars(sys.modules[__name__])["int"] is float
