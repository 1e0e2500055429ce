"""Networks that draw random numbers in eval mode are found, with the line that does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ptpipe import StageError
from ptpipe_torch import FunctionRef, Model, Recipe, builder
from ptpipe_torch.random_outputs import random_draws, random_draws_of, refuse_random_outputs
from ptpipe_torch.runtime import cpu_random_states

from ...signatures import classifier

INPUTS = (torch.zeros(2, 4),)
RANDOM: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "dropout": lambda net, x: F.dropout(x, 0.4),
    "noise": lambda net, x: x + torch.randn_like(x),
    "sample": lambda net, x: torch.bernoulli(torch.sigmoid(x)),
    "order": lambda net, x: x + torch.randperm(4).float(),
    "softmax": lambda net, x: F.gumbel_softmax(x),
    "in place": lambda net, x: x.clone().uniform_(),
    "size": lambda net, x: x.repeat(int(torch.randint(1, 100, ()).item()), 1),
}
ELSEWHERE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "python": lambda net, x: x * random.random(),
    "numpy": lambda net, x: x + float(np.random.rand()),
}
FIXED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "nothing": lambda net, x: x,
    "training alone": lambda net, x: F.dropout(x, 0.4, net.training),
    "unused": lambda net, x: (torch.randn(3), x)[1],
    "not finite": lambda net, x: (torch.randn(3), x / 0)[1],
    "no probability": lambda net, x: F.dropout(x, 0.0),
    "attention": lambda net, x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
}


class Network(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 4), (RANDOM | ELSEWHERE | FIXED)[name]

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, self.linear(x))


@builder
def network(*, name: str) -> nn.Module:
    return Network(name)


@pytest.mark.parametrize("name", RANDOM)
def test_the_line_that_draws_is_named(name: str) -> None:
    net = Network(name).eval()
    state = torch.get_rng_state()
    reason = random_draws(net, INPUTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert reason and f"{__file__}:" in reason and f'`"{name}": lambda net, x: ' in reason
    assert "Draw them in train mode alone" in reason and "more)" not in reason
    with pytest.raises(StageError, match="draws random numbers in eval mode too"):
        refuse_random_outputs(net, INPUTS)


@pytest.mark.parametrize("name", FIXED)
def test_what_changes_no_output_is_not_random(name: str) -> None:
    net = Network(name).eval()
    assert random_draws(net, INPUTS) is None
    refuse_random_outputs(net, INPUTS)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_python_and_numpy_draw_too(name: str) -> None:
    net, states = Network(name).eval(), cpu_random_states()
    reason = random_draws(net, INPUTS)
    assert reason and reason.startswith("this network draws random numbers in eval mode too. Draw them in train mode")
    assert cpu_random_states() == states


def test_further_lines_are_counted() -> None:
    net = nn.Sequential(Network("noise"), Network("dropout")).eval()
    reason = random_draws(net, INPUTS)
    assert reason and '`"noise": ' in reason and " and 1 more)" in reason


def test_a_network_that_does_not_run_is_left_to_what_runs_it() -> None:
    reasons = {}
    for num_inputs in (4, 5):
        recipe = Recipe(FunctionRef.to(network, name="dropout"), classifier((num_inputs,), 4))
        reasons[num_inputs] = random_draws_of(Model.from_module(recipe, Network("dropout")))
    assert reasons[4] and reasons[5] is None
