from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ptpipe_eval.config import AccuracyConfig
from ptpipe_eval.quality.gates import fails_undecided
from ptpipe_eval.seeds.judge import SeedDrop
from ptpipe_torch.quality.proportions import ProportionDrop

MARGIN = 0.003


def test_seeds_that_agree_leave_what_the_samples_leave() -> None:
    own = ProportionDrop(17, 5, 10_000)
    assert SeedDrop([own] * 3).limits(0.95) == pytest.approx(own.limits(0.95))
    assert SeedDrop([own] * 3).deviation == 0


@pytest.mark.parametrize("lost", [(3, 3, 3), (0, 1, 8)])
def test_a_mean_at_the_margin_is_not_above_it(lost) -> None:
    """As for one run: a sum of floats would be."""
    mean = SeedDrop([ProportionDrop(number, 0, 1000) for number in lost]).drop
    assert mean == MARGIN
    assert not fails_undecided(AccuracyConfig(candidate="x", max_drop=MARGIN), mean)


def test_so_many_samples_that_only_seeds_count() -> None:
    drops = [ProportionDrop(lost * 10**6, 0, 10**9) for lost in (1, 2, 4)]
    low, high = SeedDrop(drops).limits(0.95)
    expected = stats.t.interval(0.9, 2, loc=7 / 3000, scale=stats.sem([0.001, 0.002, 0.004]))
    assert (low, high) == pytest.approx(expected, rel=1e-3)


def test_between_both() -> None:
    drops = [ProportionDrop(17, 5, 10_000), ProportionDrop(30, 5, 10_000)]
    both = SeedDrop(drops)
    widths = [limit - both.drop for limit in both.limits(0.95)]
    of_samples = [np.mean([own.limits(0.95)[side] - own.drop for own in drops]) for side in (0, 1)]
    of_seeds = stats.t.ppf(0.95, 1) * both.deviation / 2**0.5
    assert widths[0] == pytest.approx(-np.hypot(of_samples[0], of_seeds))
    assert widths[1] == pytest.approx(np.hypot(of_samples[1], of_seeds))


def test_a_mean_at_the_margin_passes_in_one_of_twenty_cases_at_most() -> None:
    """Three seeds whose true drops are spread around the margin, on samples of their own."""
    random, count, discordance, total = np.random.default_rng(0), 80, 0.02, 1_000_000
    drops_R3 = MARGIN + 0.002 * random.standard_normal((count, 3))
    lost_R3, gained_R3 = (random.binomial(total, (discordance + sign * drops_R3) / 2) for sign in (1, -1))
    rows = zip(lost_R3.tolist(), gained_R3.tolist(), strict=True)
    seeds = [SeedDrop([ProportionDrop(b, c, total) for b, c in zip(*row, strict=True)]) for row in rows]
    passed = np.mean([own.limits(0.95)[1] < MARGIN for own in seeds])
    assert 0.02 <= passed < 0.05 + 2 * (0.05 * 0.95 / count) ** 0.5
