"""Ranges in QAT, on data with long tails: what is far from the rest counts most in a regression."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_quant import fake_quant
from ptpipe_quant.transforms import prepare_qat

from ...signatures import stored_pictures

SCHEME: Any = {"inputs": stored_pictures((4,)), "backend": "qnnpack", "weights": "per_channel", "skip": []}


def r2_after(network: nn.Module, x: torch.Tensor, y: torch.Tensor, num_epochs: int, lr: float) -> float:
    """Train, and return the share of the variance that the network explains."""
    optimizer = torch.optim.AdamW(network.parameters(), lr)
    for _ in range(num_epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.mse_loss(network.train()(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return 1 - nn.functional.mse_loss(network.eval()(x), y).item() / y.var().item()


def torchs_own(average: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    return torch.where(average.isinf(), now, average)


@pytest.mark.parametrize("learned_step_size", [False, True])
@pytest.mark.parametrize("tail", ["targets", "features"])
def test_a_long_tail_is_learned(tail: str, learned_step_size: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    normal = torch.randn(2048, 4)
    x = normal.exp() if tail == "features" else normal
    y = 3 * x[:, :1] + 2 * x[:, 1:2] if tail == "features" else normal[:, :1].exp()
    x, y = ((values - values.mean(0)) / values.std(0) for values in (x, y))
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    expected = r2_after(net, x, y, 30, 3e-3)

    def by_qat() -> float:
        options = SCHEME | {"batch_norm": "fold", "learned_step_size": learned_step_size, "freeze_at": 1.0}
        torch.manual_seed(1)
        return r2_after(prepare_qat(copy.deepcopy(net), **options), x, y, 5, 1e-3)

    found = by_qat()
    monkeypatch.setattr(fake_quant, "_FARTHER", [torchs_own] * 2)
    cut = by_qat()
    assert expected > 0.95
    assert found > expected - 0.05 > cut
