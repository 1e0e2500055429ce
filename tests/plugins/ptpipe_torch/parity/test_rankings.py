"""Networks that compute with the positions that another implementation found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from ptpipe_torch.parity.rankings import Rankings, comparable, ranks_values

SPELLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "topk": lambda x: x.topk(3, 1)[1],
    "smallest": lambda x: torch.topk(x, 3, largest=False).indices,
    "sort": lambda x: torch.sort(x, dim=1, descending=True)[1],
    "rows": lambda x: x.sort(0)[1],
    "argsort": lambda x: x.argsort(),
    "stable": lambda x: torch.argsort(x, dim=-1, stable=True),
}
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


class Ranked(nn.Module):
    def __init__(self, rank: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, self.rank(x) % 5)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_positions_are_recorded_and_imposed(spelling: str, mode: Any) -> None:
    rank = SPELLINGS[spelling]
    with mode():
        with Rankings() as own:
            positions = rank(X)
        with Rankings([positions.flip(1)]) as imposed:
            reversed_positions = rank(X)
    assert torch.equal(own.positions[0], positions)
    assert torch.equal(imposed.positions[0], positions)  # its own
    assert torch.equal(reversed_positions, positions.flip(1))
    assert torch.equal(rank(X), positions)  # afterwards
    assert not torch.equal(own.values[0], imposed.values[0])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_ranks_is_found_in_graphs(spelling: str) -> None:
    network = Ranked(SPELLINGS[spelling])
    assert ranks_values(symbolic_trace(network))
    assert ranks_values(torch.export.export(network, (X,)).module())
    assert not ranks_values(symbolic_trace(nn.Sequential(nn.ReLU())))


def test_values_are_those_at_the_imposed_positions() -> None:
    with Rankings([torch.tensor([[4, 3]])]):
        values, positions = torch.arange(5.0)[None].topk(2)
        others, _ = torch.arange(6.0)[None].topk(3)  # none is imposed
    assert (values.tolist(), positions.tolist(), others.tolist()) == ([[4, 3]], [[4, 3]], [[5, 4, 3]])


def test_positions_of_another_shape_are_not_imposed() -> None:
    with Rankings([torch.tensor([[0]])]) as rankings:
        assert torch.arange(5.0)[None].topk(2)[1].tolist() == [[4, 3]]
    assert rankings.values[0].tolist() == [[4, 3, 4, 3]]


def test_a_change_of_places_of_nearly_equal_values_is_no_difference() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.000001, 2.0]])
    otherwise = scores + torch.tensor([[0, 0.000002, 0, 0]])
    values, positions = otherwise.topk(2)
    with Rankings([positions]) as rankings:
        scores.topk(2)
    assert rankings.positions[0].tolist() != positions.tolist()
    torch.testing.assert_close(rankings.values[0], comparable(values, values, 1))


@pytest.mark.parametrize("fault", ["smallest", "other places"])
def test_another_ranking_has_other_values(fault: str) -> None:
    scores = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    values, positions = (scores.topk(2, largest=False)) if fault == "smallest" else scores.flip(1).topk(2)
    with Rankings([positions]) as rankings:
        scores.topk(2)
    assert (rankings.values[0] - comparable(values, values, 1)).abs().max() > 0.5


def test_a_number_alone_can_be_ranked() -> None:
    with Rankings([torch.tensor(0)]) as rankings:
        assert torch.tensor(3.0).sort()[0] == 3
    assert rankings.values == [torch.tensor(3.0)]
