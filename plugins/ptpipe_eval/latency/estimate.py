"""From the durations of calls to latencies, ratios with intervals, and verdicts. Imports no torch.

Models are measured in rounds: in each, every model runs one block of calls, in random order, so that a slow moment of
the machine meets all of them alike. After a few rounds all models move to fresh processes, because two
processes with one and the same model differ by more than their rounds do (where the memory happens to be). The
processes started together are a *start*.

Shape legend: S starts, M models, R rounds of a start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ptpipe_eval.latency.latencies import Speed

MIN_STARTS = 3
"""Below it there is no interval worth the name: Student's t with one degree of freedom is 12.7."""
_MIN_TRIMMED_STARTS = 12
_CONFIDENCE = 0.95
_MAX_WAITED_FRACTION = 0.05
"""Of a block's time that its thread may wait for a processor. Several threads also wait for each other."""
_MAX_EXCESS_LOG, _MAX_EXCESS_SPREAD = math.log(1.1), 5
"""How much slower than its process's other blocks one may be, at least, and in units of what is usual: beyond,
something else hit it."""


@dataclass(frozen=True)
class Block:
    """Calls of one model, one after the other."""

    durations_ns: Sequence[int]
    cpu_ns: int
    """CPU time of all threads."""
    waited_ns: int | None
    """Time that threads were runnable without a processor; None where the system does not report it."""

    @cached_property
    def median_ns(self) -> float:
        """Of the calls."""
        return float(np.median(self.durations_ns))

    def waited_fraction(self, num_threads: int) -> float:
        """Return which part of its threads' time they waited for a processor.

        Where the system does not say, a single thread waited when it was not computing; of several, nothing is known.
        """
        total_ns = sum(self.durations_ns)
        if self.waited_ns is not None:
            return self.waited_ns / (num_threads * total_ns)
        return max(0.0, 1 - self.cpu_ns / total_ns) if num_threads == 1 else 0.0


@dataclass(frozen=True)
class Round:
    """A block of every model, in the order of the models; the last one is the control."""

    start: int
    blocks: tuple[Block, ...]

    def waited(self, num_threads: int) -> bool:
        """Whether a model's only thread waited for a processor for long."""
        return num_threads == 1 and any(block.waited_fraction(1) > _MAX_WAITED_FRACTION for block in self.blocks)


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval of 95 %."""

    low: float
    value: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """The latency of one model in one cell."""

    median_ms: Interval
    """Geometric mean over starts of the median call."""
    ratio: Interval
    """Of its latency to the baseline's."""
    verdict: Speed
    percentiles_ms: dict[int, float]
    """10th, 90th, 99th of all calls, those that so many calls can tell."""
    num_calls: int
    cpu_ms: float
    """CPU time of a call, of all threads."""
    waited_fraction: float
    slowest_block_ms: float
    """The largest of the blocks' medians."""


@dataclass(frozen=True)
class CellEstimate:
    """One batch size and number of threads."""

    models: tuple[Estimate, ...]
    """Without the control."""
    noise: float
    """How far from 1 the ratio of two copies of the baseline may be: smaller differences are noise."""
    num_starts: int
    num_disturbed: int
    """Rounds that were measured again."""
    ratios_RM: tuple[tuple[float, ...], ...]
    """Of every round, to the baseline; the last column is the control's."""

    @property
    def num_rounds(self) -> int:
        """Of those that the figures are computed from."""
        return len(self.ratios_RM)


def estimate_cell(rounds: Sequence[Round], baseline: int, num_threads: int) -> CellEstimate:
    """Return the estimates of all models. `rounds` has at least one round, disturbed ones included.

    Where fewer than three starts have an undisturbed round, the cell is unmeasurable: the figures are of all rounds.
    """
    good = undisturbed(rounds, num_threads)
    is_measurable = len({own.start for own in good}) >= MIN_STARTS
    used = good if is_measurable else list(rounds)
    logs_RM = np.log([[block.median_ns for block in own.blocks] for own in used])
    ratios_RM = logs_RM - logs_RM[:, [baseline]]
    starts_R = np.array([own.start for own in used])
    ratios = [_interval(_start_medians(column, starts_R)) for column in ratios_RM.T]
    medians = [_interval(_start_medians(column, starts_R)) for column in logs_RM.T]
    noise = max(abs(ratios[-1].low), abs(ratios[-1].high)) if is_measurable else math.inf
    models = []
    for position in range(len(ratios) - 1):
        blocks = [own.blocks[position] for own in used]
        verdict = _verdict(ratios[position], noise) if is_measurable else "unmeasurable"
        if position == baseline:
            verdict = "baseline"
        models.append(_estimate(blocks, medians[position], ratios[position], verdict, num_threads))
    return CellEstimate(
        tuple(models),
        math.expm1(noise) if is_measurable else math.inf,
        len(set(starts_R.tolist())),
        len(rounds) - len(good),
        tuple(map(tuple, np.exp(ratios_RM).tolist())),
    )


def undisturbed(rounds: Sequence[Round], num_threads: int) -> list[Round]:
    """Return the rounds in which nothing but the models decided how long they took.

    A block is compared with those of its own process. Rounds in which baseline and control are far apart must stay: two
    processes with one model do differ, and without those that do the control would promise less noise than there is.
    """
    logs_RM = np.log([[block.median_ns for block in own.blocks] for own in rounds])
    starts_R = np.array([own.start for own in rounds])
    excess_RM = np.empty_like(logs_RM)
    for start in np.unique(starts_R):
        excess_RM[starts_R == start] = logs_RM[starts_R == start] - np.median(logs_RM[starts_R == start], axis=0)
    limit = max(_MAX_EXCESS_LOG, _MAX_EXCESS_SPREAD * float(np.median(np.abs(excess_RM))))
    most_R = excess_RM.max(axis=1)
    return [own for own, most in zip(rounds, most_R, strict=True) if most <= limit and not own.waited(num_threads)]


def is_precise(cell: CellEstimate, precision: float) -> bool:
    """Whether every ratio is known to within this fraction, and the noise to be small beside what they may show."""
    return cell.noise <= 2 * precision and all(
        own.ratio.high / own.ratio.low <= ((1 + precision) / (1 - precision)) for own in cell.models
    )


def _verdict(ratio: Interval, noise: float) -> Speed:
    """Claim a difference that is certain to 95 % and larger than two copies of one model show."""
    if ratio.low > 0 and ratio.value > noise:
        return "slower"
    return "faster" if ratio.high < 0 and ratio.value < -noise else "same within noise"


def _start_medians(values_R: npt.NDArray[np.float64], starts_R: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the median of each start's rounds, (S,): a slow moment that one block met is not in it."""
    return np.array([np.median(values_R[starts_R == start]) for start in np.unique(starts_R)])


def _interval(values_S: npt.NDArray[np.float64]) -> Interval:
    """Return mean and confidence interval by Student's t over starts, which are independent of each other.

    Kalibera and Jones, Rigorous Benchmarking in Reasonable Time (ISMM 2013), section 6: the variance of the highest
    level alone has that of all levels below in it. Of twelve starts and more the mean is without the lowest and the
    highest fifth: a start that something slowed would decide it. Its interval has the variance of the values with
    these replaced by the next ones: Tukey and McLaughlin, Less Vulnerable Confidence and Significance Procedures
    (Sankhya A 25, 1963).
    """
    from scipy.special import stdtrit

    count = len(values_S)
    num_cut = count // 5 if count >= _MIN_TRIMMED_STARTS else 0
    ordered_S = np.sort(values_S)
    kept_S = ordered_S[num_cut : count - num_cut]
    mean = float(kept_S.mean())
    if count < MIN_STARTS:
        return Interval(-math.inf, mean, math.inf)
    deviation = float(ordered_S.clip(kept_S[0], kept_S[-1]).std(ddof=1))
    quantile = float(stdtrit(len(kept_S) - 1, (1 + _CONFIDENCE) / 2))
    reach = quantile * deviation * math.sqrt(count) / len(kept_S)
    return Interval(mean - reach, mean, mean + reach)


def _estimate(
    blocks: Sequence[Block], log_median: Interval, log_ratio: Interval, verdict: Speed, num_threads: int
) -> Estimate:
    durations_ns = np.concatenate([np.asarray(block.durations_ns) for block in blocks])
    num_calls = len(durations_ns)
    percents = [percent for percent in (10, 90, 99) if num_calls >= calls_needed(percent)]
    percentiles_ms = (np.percentile(durations_ns, percents) / 1e6).tolist()
    waited = sum(block.waited_fraction(num_threads) * sum(block.durations_ns) for block in blocks)
    return Estimate(
        median_ms=_exp(log_median, 1e-6),
        ratio=_exp(log_ratio),
        verdict=verdict,
        percentiles_ms=dict(zip(percents, percentiles_ms, strict=True)),
        num_calls=num_calls,
        cpu_ms=sum(block.cpu_ns for block in blocks) / num_calls / 1e6,
        waited_fraction=waited / float(durations_ns.sum()),
        slowest_block_ms=max(block.median_ns for block in blocks) / 1e6,
    )


def calls_needed(percent: int) -> int:
    """Return how many calls hold one beyond this percentile with a confidence of 95 %: 299 for the 99th.

    Conover, Practical Nonparametric Statistics (3rd ed.), section 3.2.
    """
    fraction = max(percent, 100 - percent) / 100
    return math.ceil(math.log(1 - _CONFIDENCE) / math.log(fraction))


def _exp(log: Interval, unit: float = 1.0) -> Interval:
    high = math.inf if math.isinf(log.high) else unit * math.exp(log.high)
    return Interval(unit * math.exp(log.low), unit * math.exp(log.value), high)
