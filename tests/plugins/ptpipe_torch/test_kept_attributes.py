"""What networks keep from one call to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_torch.kept_attributes import forget_sizes
from ptpipe_torch.torch_export import export_program

INPUTS = (torch.ones(2, 4),)


class Keeping(nn.Module):
    """Calls a function with itself and its input."""

    sizes = None

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body
        self.mask, self.calls = None, 0
        self.register_buffer("state", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.body(self, x)


def by_sizes(n: Any, x: torch.Tensor) -> torch.Tensor:
    if n.sizes != x.shape:
        n.sizes, n.table = x.shape, torch.arange(float(x.shape[1]))
    return n.table


def by_number(n: Any, x: torch.Tensor) -> torch.Tensor:
    if n.mask is None or n.sizes != x.shape[0]:
        n.sizes, n.mask = x.shape[0], torch.ones(x.shape[0], 4)
    return n.mask


def by_tensor(n: Any, x: torch.Tensor) -> torch.Tensor:
    if n.state is None or n.state.shape[0] != x.shape[0]:
        n.state = x.new_ones(x.shape[0], 4)
    return n.state


BODIES = [by_sizes, by_number, by_tensor]


@pytest.mark.parametrize("body", BODIES)
def test_sizes_of_an_earlier_batch_are_forgotten(body: Any) -> None:
    network = Keeping(body).eval()
    expected = network(*INPUTS)
    network(torch.ones(7, 4))
    assert forget_sizes(network, INPUTS)
    assert (network.sizes, network.mask, network.state) == (None, None, None)
    assert "sizes" not in vars(network)  # the class has it
    assert torch.equal(network(*INPUTS), expected)


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch prefers buffers
@pytest.mark.parametrize("body", BODIES)
def test_a_network_that_was_called_is_exported_for_batches_of_any_size(body: Any) -> None:
    network = Keeping(body).eval()
    network(torch.ones(7, 4))
    program = export_program(network, INPUTS, ({0: torch.export.Dim("batch")},))
    for num in (3, 7):
        torch.testing.assert_close(program.module()(torch.ones(num, 4)), network(torch.ones(num, 4)))


def counting(n: Any, x: torch.Tensor) -> torch.Tensor:
    n.calls += 1
    return x * min(n.calls, 1)


def required(n: Any, x: torch.Tensor) -> torch.Tensor:
    """Can't be called without the sizes of a call before."""
    factor = 1 if n.sizes is None else 2
    n.sizes = x.shape
    return x * factor


@pytest.mark.parametrize("body", [counting, required, lambda n, x: x])
def test_other_networks_are_left_as_they_were(body: Any) -> None:
    network = Keeping(body).eval()
    network(torch.ones(7, 4))
    before = dict(vars(network))
    assert not forget_sizes(network, INPUTS)
    assert vars(network) == before
