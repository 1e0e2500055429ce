"""Intervals and tests for two models that are right or wrong on the same samples. Needs numpy and scipy.special.

Of N samples, `num_lost` are right in the baseline alone and `num_gained` in the candidate alone: the discordant cells b
and c of the 2x2 table. The drop is (b - c) / N. Counts may be arrays, which are treated elementwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

_NUM_BISECTIONS = 60
"""From an interval of at most 2 to below float64's resolution."""
_SAME = 1e-12
"""Drops that differ by less differ by rounding."""
_POWER = 0.8
"""Of a gate with the number of samples that `num_samples_needed` returns."""


def one_sided_z(confidence: float) -> float:
    """Return the normal quantile of a one-sided limit: 1.645 for 0.95."""
    return NormalDist().inv_cdf(confidence)


@dataclass(frozen=True)
class ProportionDrop:
    """By how much smaller a fraction of the samples is right than in the baseline."""

    num_lost: int
    """Samples that are right in the baseline alone."""
    num_gained: int
    """Samples that are right in the candidate alone."""
    num_samples: int

    @property
    def drop(self) -> float:
        """The estimate, exact to the sample; negative where the candidate is better."""
        return (self.num_lost - self.num_gained) / self.num_samples

    @property
    def discordance(self) -> float:
        """The fraction of the samples that are right in one of the two alone."""
        return (self.num_lost + self.num_gained) / self.num_samples

    def limits(self, confidence: float) -> tuple[float, float]:
        """Return the lower and the upper one-sided limit; together they are an interval at 2 * confidence - 1."""
        low, high = tango_limits(self.num_lost, self.num_gained, self.num_samples, one_sided_z(confidence))
        return float(low), float(high)

    def p_value(self, margin: float) -> float:
        """Return the one-sided p-value against a drop of at least `margin`."""
        return tango_p(self.num_lost, self.num_gained, self.num_samples, margin)

    def num_samples_needed(self, margin: float, confidence: float) -> int | None:
        """Return how many samples decide with 80 % probability, if drop and discordance stay; None where none do."""
        return num_samples_needed(margin, self.drop, self.discordance, confidence)


def tango_limits(
    num_lost: npt.ArrayLike, num_gained: npt.ArrayLike, num_samples: npt.ArrayLike, z: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the lower and the upper score limit of the drop, each at the normal quantile `z`.

    All values of the drop that the score test doesn't reject: Tango, "Equivalence test and confidence interval for the
    difference in proportions for the paired-sample design", Statistics in Medicine 17 (1998), equation 8. Found by
    bisection, which needs no special case for tables with empty cells.
    """
    lost, gained, total = (np.asarray(count, dtype=np.float64) for count in (num_lost, num_gained, num_samples))
    return -_upper_limit(gained, lost, total, z), _upper_limit(lost, gained, total, z)


def tango_p(num_lost: npt.ArrayLike, num_gained: npt.ArrayLike, num_samples: npt.ArrayLike, margin: float) -> float:
    """Return the one-sided p-value against a drop of at least `margin`.

    It is below 1 - confidence exactly where the upper one-sided limit at that confidence is below the margin.
    """
    from scipy import special

    lost, gained, total = (np.asarray(count, dtype=np.float64) for count in (num_lost, num_gained, num_samples))
    deviation = _standard_deviation(lost, gained, total, np.asarray(margin))
    surplus = lost - gained - total * margin
    return float(special.ndtr(surplus / deviation) if deviation > 0 else 0.5 + 0.5 * np.sign(surplus))


def mcnemar_mid_p(num_lost: int, num_gained: int) -> float:
    """Return the two-sided mid-p value of McNemar's test that the two models are equally often right.

    The exact p-value less the probability of the observed table (Fagerland, Lydersen and Laake, "The McNemar test for
    binary matched-pairs data", BMC Medical Research Methodology 13:91, 2013). 1 without a discordant sample.
    """
    fewer, num_discordant = min(num_lost, num_gained), num_lost + num_gained
    if num_lost == num_gained:  # the observed table is in both tails
        return float(1 - 0.5 * _binomial(fewer, num_discordant)) if num_discordant else 1.0
    return mcnemar_exact_p(num_lost, num_gained) - _binomial(fewer, num_discordant)


def mcnemar_exact_p(num_lost: int, num_gained: int) -> float:
    """Return the two-sided p-value of the binomial test that a discordant sample is as often lost as gained."""
    from scipy import special

    fewer, num_discordant = min(num_lost, num_gained), num_lost + num_gained
    return min(1.0, 2 * float(special.bdtr(fewer, num_discordant, 0.5)))


def num_samples_needed(
    margin: float, drop: float, discordance: float, confidence: float, power: float = _POWER
) -> int | None:
    """Return how many samples decide on which side of `margin` the drop is, if it and the discordance stay as given.

    A one-sided score test at `confidence` then decides with a probability of about `power`: the normal approximation,
    with the variance that Tango's test has where the drop is the margin (Nam, "Establishing equivalence of two
    treatments and sample size requirements in matched-pairs design", Biometrics 53, 1997). None where no number does,
    because the drop equals the margin.
    """
    distance = abs(margin - drop)
    if distance <= _SAME:
        return None
    lost, gained, one = (
        np.asarray(fraction, dtype=np.float64) for fraction in ((discordance + drop) / 2, (discordance - drop) / 2, 1)
    )
    at_margin = float(_standard_deviation(lost, gained, one, np.asarray(min(margin, 1.0))))
    as_given = math.sqrt(max(0.0, discordance - drop**2))
    root = (one_sided_z(confidence) * at_margin + one_sided_z(power) * as_given) / distance
    return max(1, math.ceil(root**2))


def smallest_margin_of(num_samples: int, discordance: float, confidence: float) -> float:
    """Return the margin that `num_samples` decide on with a probability of 80 % where as many are lost as gained."""
    low, high = 0.0, 1.0
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        needed = num_samples_needed(middle, 0.0, discordance, confidence)
        low, high = (low, middle) if needed is not None and needed <= num_samples else (middle, high)
    return high


def num_differing_limit(num_differing: int, num_samples: int, confidence: float) -> float:
    """Return the upper limit of the fraction of samples that differ (Clopper and Pearson, 1934): 3 / N for none."""
    from scipy import special

    if num_differing >= num_samples:
        return 1.0
    return float(special.betaincinv(num_differing + 1, num_samples - num_differing, confidence))


def _upper_limit(
    lost: npt.NDArray[np.float64], gained: npt.NDArray[np.float64], total: npt.NDArray[np.float64], z: float
) -> npt.NDArray[np.float64]:
    """Return the drop above the estimate at which the score statistic is -z."""
    low = (lost - gained) / total
    high = np.ones_like(low)
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        deviation = _standard_deviation(lost, gained, total, middle)
        is_inside = lost - gained - total * middle + z * deviation > 0
        low, high = np.where(is_inside, middle, low), np.where(is_inside, high, middle)
    return high


def _standard_deviation(
    lost: npt.NDArray[np.float64],
    gained: npt.NDArray[np.float64],
    total: npt.NDArray[np.float64],
    drop: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the standard deviation of b - c where the drop is as given, by Tango's constrained estimate."""
    # 2 N q^2 + linear q + constant = 0, q: the probability of a gained sample.
    linear = (2 * total - lost + gained) * drop - lost - gained
    constant = -gained * drop * (1 - drop)
    root = np.sqrt(np.maximum(0, linear**2 - 8 * total * constant))
    with np.errstate(divide="ignore", invalid="ignore"):  # the branch that is not taken
        # The second form has no difference of nearly equal numbers where `linear` is positive.
        gain = np.where(linear <= 0, (root - linear) / (4 * total), -2 * constant / (root + linear))
    return np.sqrt(np.maximum(0, total * (2 * gain + drop * (1 - drop))))


def _binomial(count: int, total: int) -> float:
    """Return the probability of `count` of `total` with probability 1/2."""
    from scipy import special

    return float(special.bdtr(count, total, 0.5) - (special.bdtr(count - 1, total, 0.5) if count else 0.0))
