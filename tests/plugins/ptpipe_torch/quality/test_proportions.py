from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from ptpipe_torch.quality.proportions import (
    mcnemar_exact_p,
    mcnemar_mid_p,
    num_differing_limit,
    num_samples_needed,
    one_sided_z,
    tango_limits,
    tango_p,
)

Z95 = one_sided_z(0.975)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, int, int]:
    """`num_lost`, `num_gained` and `num_samples`, empty cells and all-discordant tables among them."""
    total = draw(st.one_of(st.integers(1, 12), st.integers(1, 100_000)))
    lost = draw(st.one_of(st.just(0), st.just(total), st.integers(0, total)))
    gained = draw(st.one_of(st.just(0), st.just(total - lost), st.integers(0, total - lost)))
    return lost, gained, total


def limits(table: tuple[int, int, int], z: float = Z95) -> tuple[float, float]:
    low, high = tango_limits(*table, z)
    return float(low), float(high)


class TestTango:
    def test_published_interval(self) -> None:
        """The 2x2 table 59, 6, 16, 80 (airway hyper-responsiveness): Fagerland, Lydersen and Laake, 2014, table IV."""
        assert limits((6, 16, 161)) == pytest.approx((-0.1240, -0.0054), abs=5e-5)

    @pytest.mark.parametrize("total", [1, 7, 360, 10_000])
    def test_without_a_discordant_sample_it_is_that_of_wilson(self, total) -> None:
        expected = Z95**2 / (total + Z95**2)
        assert limits((0, 0, total)) == pytest.approx((-expected, expected), rel=1e-12)

    @pytest.mark.parametrize("total", [1, 7, 10_000])
    def test_all_discordant(self, total) -> None:
        low, high = limits((total, 0, total))
        assert high == 1 and -1 < low < 1
        assert limits((0, total, total)) == pytest.approx((-1, -low))

    @given(tables(), st.floats(0.5, 5))
    def test_contains_the_estimate_and_is_symmetric_and_in_range(self, table, z) -> None:
        lost, gained, total = table
        low, high = limits(table, z)
        assert -1 <= low <= (lost - gained) / total <= high <= 1
        mirrored_low, mirrored_high = limits((gained, lost, total), z)
        assert (low, high) == (-mirrored_high, -mirrored_low)

    @given(tables(), st.floats(0.5, 4))
    def test_a_higher_confidence_is_wider_and_another_lost_sample_raises_both_limits(self, table, z) -> None:
        lost, gained, total = table
        low, high = limits(table, z)
        wider_low, wider_high = limits(table, z + 0.5)
        assert wider_low <= low + 1e-12 and high <= wider_high + 1e-12
        if lost + gained < total:
            more_low, more_high = limits((lost + 1, gained, total), z)
            assert low <= more_low + 1e-12 and high <= more_high + 1e-12

    @given(tables(), st.floats(-0.99, 0.99), st.floats(0.55, 0.999))
    def test_its_limits_are_where_the_score_test_turns(self, table, margin, confidence) -> None:
        _, high = limits(table, one_sided_z(confidence))
        if abs(high - margin) > 1e-9:
            assert (high < margin) == (tango_p(*table, margin) < 1 - confidence)

    def test_many_tables_at_once(self) -> None:
        lost, gained = np.array([[0, 3], [10, 2]]), np.array([[0, 1], [5, 9]])
        low, high = tango_limits(lost, gained, 200, Z95)
        for place in np.ndindex(2, 2):
            assert (low[place], high[place]) == limits((int(lost[place]), int(gained[place]), 200))


def every_table(discordance: float, drop: float, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All counts (lost, gained) that have a probability worth counting, and it."""
    chances = ((discordance + drop) / 2, (discordance - drop) / 2)
    ranges = [
        np.arange(
            max(0, math.floor(total * p - 8 * math.sqrt(total * p) - 8)),
            math.ceil(total * p + 8 * math.sqrt(total * p) + 8),
        )
        for p in chances
    ]
    lost, gained = (counts.ravel() for counts in np.meshgrid(*ranges, indexing="ij"))
    rest = total - lost - gained
    log = special.gammaln(total + 1) + special.xlog1py(rest, -discordance)
    for count, chance in ((lost, chances[0]), (gained, chances[1])):
        log = log + special.xlogy(count, chance) - special.gammaln(count + 1)
    return lost, gained, np.exp(log - special.gammaln(rest + 1))


class TestOperatingCharacteristics:
    """Exact probabilities, summed over every table: no simulation that may be lucky."""

    @pytest.mark.parametrize("discordance", [0.004, 0.01, 0.04])
    @pytest.mark.parametrize("relative_drop", [0, 0.5])
    def test_the_interval_covers_the_truth_in_95_percent(self, discordance, relative_drop) -> None:
        drop = relative_drop * discordance
        lost, gained, chance = every_table(discordance, drop, 10_000)
        assert chance.sum() == pytest.approx(1, abs=1e-9)
        low, high = tango_limits(lost, gained, 10_000, Z95)
        assert 0.94 <= chance[(low <= drop) & (drop <= high)].sum() <= 0.96

    @pytest.mark.parametrize("num_samples", [100, 360, 1000, 10_000])
    def test_where_no_sample_is_gained_a_drop_equal_to_the_margin_is_decided_in_less_than_10_percent(
        self, num_samples
    ) -> None:
        """The figures of decision 0018 and docs/gates.md."""
        lost = np.arange(60)
        low, high = tango_limits(lost, np.zeros(60), num_samples, one_sided_z(0.95))
        margins = np.arange(0.5, 12, 0.02)[:, None] / num_samples
        chance = stats.binom.pmf(lost, num_samples, margins)
        assert 0.065 < (chance * (high < margins)).sum(axis=1).max() < 0.0695
        assert 0.093 < (chance * (low > margins)).sum(axis=1).max() < 0.0945

    @pytest.mark.parametrize("discordance", [0.004, 0.01, 0.04])
    @pytest.mark.parametrize("margin", [0.001, 0.003])
    def test_a_drop_equal_to_the_margin_passes_in_at_most_5_percent(self, discordance, margin) -> None:
        lost, gained, chance = every_table(discordance, margin, 10_000)
        _, high = tango_limits(lost, gained, 10_000, one_sided_z(0.95))
        assert 0.03 < chance[high < margin].sum() <= 0.0505  # a score test: 5.01 % at the worst of these

    @pytest.mark.parametrize(
        ("margin", "drop", "discordance"),
        [(0.003, 0.0005, 0.01), (0.003, 0, 0.002), (0.003, 0.006, 0.02), (0.01, -0.01, 0.05), (0.01, 0.03, 0.05)],
    )
    def test_the_number_of_samples_decides_in_80_percent(self, margin, drop, discordance) -> None:
        total = num_samples_needed(margin, drop, discordance, 0.95)
        lost, gained, chance = every_table(discordance, drop, total)
        low, high = tango_limits(lost, gained, total, one_sided_z(0.95))
        decided = high < margin if drop < margin else low > margin
        assert 0.78 < chance[decided].sum() < 0.85
        tenth = total // 10
        lost, gained, chance = every_table(discordance, drop, tenth)
        low, high = tango_limits(lost, gained, tenth, one_sided_z(0.95))
        assert chance[high < margin if drop < margin else low > margin].sum() < 0.5


def test_samples_needed_without_a_discordant_one() -> None:
    total = num_samples_needed(0.003, 0, 0, 0.95)
    assert total == 900
    assert limits((0, 0, total), one_sided_z(0.95))[1] < 0.003 < limits((0, 0, total - 1), one_sided_z(0.95))[1]


def test_no_number_of_samples_tells_a_drop_from_itself() -> None:
    assert num_samples_needed(0.003, 0.003, 0.01, 0.95) is None
    assert num_samples_needed(0, 0, 0, 0.95) is None
    assert num_samples_needed(0, 0.01, 0.05, 0.95) > 1000


class TestMcNemar:
    def test_published_values(self) -> None:
        assert mcnemar_mid_p(6, 16) == pytest.approx(0.034690, abs=5e-7)
        assert mcnemar_exact_p(6, 16) == pytest.approx(0.052479, abs=5e-7)

    def test_nothing_discordant(self) -> None:
        assert mcnemar_mid_p(0, 0) == mcnemar_exact_p(0, 0) == 1

    @given(st.integers(0, 3000), st.integers(0, 3000))
    def test_as_scipy_counts_and_symmetric(self, lost, gained) -> None:
        if lost + gained:
            expected = stats.binomtest(lost, lost + gained).pvalue
            assert mcnemar_exact_p(lost, gained) == pytest.approx(expected, abs=1e-9)
        mid_p = mcnemar_mid_p(lost, gained)
        assert mid_p == mcnemar_mid_p(gained, lost)
        assert 0 <= mid_p <= mcnemar_exact_p(lost, gained) <= 1


@given(st.integers(1, 100_000), st.data(), st.floats(0.5, 0.999))
def test_limit_of_the_fraction_that_differs(total, data, confidence) -> None:
    count = data.draw(st.integers(0, total))
    limit = num_differing_limit(count, total, confidence)
    assert count / total < limit or limit == 1
    if count < total:
        assert stats.binom.cdf(count, total, limit) == pytest.approx(1 - confidence, rel=1e-6)
    assert num_differing_limit(0, 1000, 0.95) == pytest.approx(0.003, rel=0.01)  # the rule of three
