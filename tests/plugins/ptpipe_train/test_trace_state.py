"""Networks whose forward pass does more than compute outputs: what a trace would lose is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe_train.parallel.partition import trace_network


class Network(nn.Module):
    """Three layers, the middle one by what `middle(self, hidden)` makes of it."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.middle = middle
        self.num_calls, self.kept, self.threshold = 0, None, float("nan")
        self.average = torch.zeros(8)
        self.register_buffer("buffer", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self, F.relu(self.first(x))))


def skipped_by_torch(network: Any, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand(1).item() < 2 else x + network.block(x)


def skipped_by_python(network: Any, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 2 else x + network.block(x)


def skipped_by_numpy(network: Any, x: torch.Tensor) -> torch.Tensor:
    return x if np.random.rand() < 2 else x + network.block(x)


def with_noise_of_a_fixed_shape(network: Any, x: torch.Tensor) -> torch.Tensor:
    return network.block(x + torch.randn(8))


@pytest.mark.parametrize("middle", [skipped_by_torch, skipped_by_python, skipped_by_numpy, with_noise_of_a_fixed_shape])
def test_random_numbers_that_decide_what_is_computed_are_refused(middle: Any) -> None:
    with pytest.raises(StageError, match=r"draws random numbers.*use mode ddp"):
        trace_network(Network(middle))


def counted(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.num_calls += 1
    return x + min(1.0, network.num_calls / 20) * network.block(x)


def far_threshold(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.num_calls += 1
    return network.block(x) if network.num_calls > 1000 else x


def counted_from_the_first_call(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.own_calls = getattr(network, "own_calls", 0) + 1
    return network.block(x)


def initialized_once(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.kept, is_first = True, network.kept is None
    return network.block(x) * 2 if is_first else network.block(x)


def averaged(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.average = 0.9 * network.average + 0.1 * x.detach().mean(0)
    return network.block(x - network.average)


def averaged_from_the_first_batch(network: Any, x: torch.Tensor) -> torch.Tensor:
    mean = x.detach().mean(0)
    network.kept = mean if network.kept is None else 0.9 * network.kept + 0.1 * mean
    return network.block(x - network.kept)


def in_place(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.average += 1
    return network.block(x + network.average)


def written_from_the_batch(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.buffer.copy_(0.9 * network.buffer + 0.1 * x.detach().mean(0))
    return network.block(x - network.buffer)


def queued(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.buffer[0] = x.detach().mean()
    return network.block(x - network.buffer)


@pytest.mark.parametrize(
    ("middle", "name"),
    [
        (counted, "num_calls"),
        (far_threshold, "num_calls"),
        (counted_from_the_first_call, "own_calls"),
        (initialized_once, "kept"),
        (averaged, "average"),
        (averaged_from_the_first_batch, "kept"),
        (in_place, "average"),
        (written_from_the_batch, "buffer"),
        (queued, "buffer"),
    ],
)
def test_attributes_that_later_passes_depend_on_are_refused(middle: Any, name: str) -> None:
    with pytest.raises(StageError, match=rf"its forward pass assigns {name}, .*use mode ddp"):
        trace_network(Network(middle))


def with_dropout(network: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(network.block(x), training=network.training)


def with_noise(network: Any, x: torch.Tensor) -> torch.Tensor:
    return network.block(x + torch.randn_like(x))


def keeping_its_output(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.kept = network.block(x)
    return network.kept * torch.tensor(2.0)


def setting_a_constant(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.num_calls = 7
    return network.block(x)


def reading_a_buffer(network: Any, x: torch.Tensor) -> torch.Tensor:
    return network.block((network.buffer * 2) * (network.buffer // x)).add_(1)


@pytest.mark.parametrize("middle", [with_dropout, with_noise, reading_a_buffer, keeping_its_output, setting_a_constant])
def test_what_a_trace_preserves_is_accepted(middle: Any) -> None:
    assert trace_network(Network(middle)).num_pieces > 1
