"""Which buffers a forward pass writes. How ranks share them: test_parallel.py."""

from __future__ import annotations

import random

import torch
from torch import nn

from ptpipe_train.evaluation import buffers_restored
from ptpipe_train.parallel.buffers import written_buffers

from .parallel_nets import Average


class Masked(nn.Module):
    """Only reads its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


class Counting(Masked):
    """Writes it in place, and draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask += 1
        return x * random.random() * torch.rand(())


def test_buffers_that_are_written_in_place_or_replaced() -> None:
    network = nn.Sequential(Masked(), Counting(), Average(), nn.BatchNorm1d(4).eval())
    streams = random.getstate(), torch.get_rng_state()
    written = written_buffers(network, [torch.ones(2, 4)])
    assert written.keys() == {"1.mask", "2.average"}
    assert written["1.mask"].tolist() == [2.0] * 4
    assert random.getstate() == streams[0]
    assert torch.equal(torch.get_rng_state(), streams[1])


def test_buffers_that_were_written_in_place_or_replaced_are_restored() -> None:
    network = nn.Sequential(Counting(), Average())
    with buffers_restored(network):
        network(torch.ones(2, 4))
        assert network[0].mask.tolist() == [2.0] * 4 and network[1].average > 0
    assert network[0].mask.tolist() == [1.0] * 4 and network[1].average == 0


def test_a_network_that_fails_writes_none() -> None:
    assert written_buffers(nn.Sequential(Counting(), nn.Linear(3, 2)), [torch.ones(2, 4)]) == {}
