from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR, StepLR

from ptpipe_train.config import Schedule
from ptpipe_train.schedule import LearningRate

STEPS_PER_EPOCH, NUM_STEPS, PEAK = 7, 42, 0.3


def ours(**schedule: Any) -> list[float]:
    lr = LearningRate(PEAK, Schedule(**schedule), NUM_STEPS, STEPS_PER_EPOCH)
    return [lr.at(step) for step in range(NUM_STEPS)]


def torchs(make: Callable[[torch.optim.Optimizer], LRScheduler], every: int = 1) -> list[float]:
    """Learning rates of torch's scheduler, which is stepped after every so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], PEAK)
    scheduler, rates = make(optimizer), []
    for step in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % every == 0 and step + 1 < NUM_STEPS:
            scheduler.step()
    return rates


def test_constant() -> None:
    assert ours() == [PEAK] * NUM_STEPS


def test_step_is_torchs() -> None:
    want = torchs(lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5), every=STEPS_PER_EPOCH)
    assert ours(name="step", every_epochs=2, gamma=0.5) == pytest.approx(want)
    assert ours(name="step")[STEPS_PER_EPOCH] == pytest.approx(PEAK / 10)


def test_cosine_is_torchs() -> None:
    want = torchs(lambda optimizer: CosineAnnealingLR(optimizer, NUM_STEPS, eta_min=0.1 * PEAK))
    assert ours(name="cosine", final=0.1) == pytest.approx(want)


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_one_cycle_is_torchs(fraction: float) -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return OneCycleLR(optimizer, PEAK, total_steps=NUM_STEPS, pct_start=fraction, cycle_momentum=False)

    assert ours(name="one_cycle", warmup=fraction) == pytest.approx(torchs(make))


def test_one_cycle_rises_over_three_tenths_unless_told_otherwise() -> None:
    assert ours(name="one_cycle") == ours(name="one_cycle", warmup=0.3)
    in_steps = ours(name="one_cycle", warmup=10)
    assert in_steps.index(max(in_steps)) == 9
    assert max(in_steps) == pytest.approx(PEAK)


def test_warmup_then_cosine_is_torchs() -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rising = LinearLR(optimizer, start_factor=1 / 6, total_iters=5)
        return SequentialLR(optimizer, [rising, CosineAnnealingLR(optimizer, NUM_STEPS - 6)], [6])

    assert ours(name="cosine", warmup=6) == pytest.approx(torchs(make))


def test_a_share_is_of_all_steps() -> None:
    assert ours(warmup=0.5) == pytest.approx(ours(warmup=NUM_STEPS // 2))
    assert ours(warmup=0.5)[0] == pytest.approx(PEAK / 21)
    assert ours(warmup=4)[:5] == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, PEAK])


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "one_cycle"])
@pytest.mark.parametrize("warmup", [None, 0, 1, 0.0, 0.99, 1000])
@pytest.mark.parametrize("num_steps", [1, 2, 9, 100])
def test_every_step_has_a_sound_rate(name: Any, warmup: Any, num_steps: int) -> None:
    lr = LearningRate(PEAK, Schedule(name=name, warmup=warmup), num_steps, 3)
    rates = [lr.at(step) for step in range(num_steps)]
    assert all(math.isfinite(rate) and 0 <= rate <= PEAK * (1 + 1e-12) for rate in rates)
    assert lr.maximum() == max(rates)
