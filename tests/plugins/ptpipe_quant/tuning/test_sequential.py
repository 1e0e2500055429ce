"""Deciding on fewer samples: how often that is wrong."""

from __future__ import annotations

import numpy as np

from ptpipe_quant.tuning.sequential import Budget, Judgement, look_sizes
from ptpipe_torch import Classification

TASK = Classification(class_names=tuple(map(str, range(10))))


def judged(baseline_N: np.ndarray, candidate_N: np.ndarray, max_drop: float) -> Judgement:
    budget = Budget(TASK, max_drop, 0.95, seed=0)
    return budget.judge(
        len(baseline_N), lambda size: ({"accuracy": baseline_N[:size]}, {"accuracy": candidate_N[:size]})
    )


def made_up(random: np.random.Generator, num_samples: int, drop: float) -> tuple[np.ndarray, np.ndarray]:
    baseline_N = random.random(num_samples) < 0.97
    return baseline_N, baseline_N & (random.random(num_samples) >= drop / 0.97)


def test_a_clear_difference_is_decided_by_an_eighth() -> None:
    random = np.random.default_rng(0)
    found = judged(*made_up(random, 4000, 0.3), max_drop=0.02)
    assert (found.is_met, found.is_sure, found.num_samples) == (False, True, 500)
    found = judged(*made_up(random, 4000, 0.0), max_drop=0.05)
    assert (found.is_met, found.is_sure, found.num_samples) == (True, True, 500)


def test_what_is_not_clear_is_decided_by_all_samples() -> None:
    baseline_N = np.ones(1000, bool)
    candidate_N = np.arange(1000) % 50 != 0  # 2 points
    found = judged(baseline_N, candidate_N, max_drop=0.02)
    assert (found.is_met, found.is_sure, found.num_samples) == (True, False, 1000)
    assert not judged(baseline_N, candidate_N, max_drop=0.0199).is_met


def test_a_drop_of_the_budget_itself_is_rarely_decided_for_sure() -> None:
    random = np.random.default_rng(1)
    wrong = [judged(*made_up(random, 2000, 0.03), max_drop=0.03) for _ in range(100)]
    # Each side may err in 5 % of the cases, over all looks together.
    assert sum(found.is_sure and found.is_met for found in wrong) <= 100 * 0.05
    assert sum(found.is_sure and not found.is_met for found in wrong) <= 100 * 0.05


def test_few_samples_are_looked_at_once() -> None:
    assert list(look_sizes(10)) == [10]
    assert list(look_sizes(597)) == [75, 150, 299, 597]
