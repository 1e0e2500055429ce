"""Intervals for how much worse a metric is that is no proportion of samples: an F1, an IoU, an R2, a perplexity.

A resample draws N of the N samples with replacement, the same ones for both models. The metric is computed from sums
over samples, so all resamples of a model are one product of a matrix of counts with the samples' own sums. That is why
`scipy.stats.bootstrap` isn't called, which copies every sample's values once for each resample (2,000 resamples of the
mean of 10,000 samples: 0.2 s for seven models together, against 0.9 s for each). The tests compare the two.

Shape legend: N samples, R resamples, S sums, M models, G groups of the jackknife.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptpipe_torch.quality.proportions import num_differing_limit, one_sided_z
from ptpipe_torch.task.task import Metric

NUM_RESAMPLES = 2000
"""The limits then move by 5 % of the interval's width, or less, with another seed."""
FEW = 10
"""With fewer samples that differ, resamples show too little of what other samples might."""
_POWER = 0.8
_MAX_GROUPS = 1000
_MAX_KINDS = 64
_MAX_CHUNK_BYTES = 64 << 20
_CACHE_BYTES = 1 << 20
"""Of draws that are counted at a time."""
_SMALLEST = 1e-12
"""An effect on a metric below it is rounding."""
_UNSEEN_CONFIDENCE = 0.95
"""At which the costs of labels are put together."""
_LABEL_AXIS = 2
"""Of rows (N, S, K): sums of each of K labels."""
_EFFECT_CONFIDENCE = 0.999
"""Of the number of samples that the worst effect is taken over: their effects add up to more than that of each."""

Floats: TypeAlias = npt.NDArray[np.float64]
Sums: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""By name, of shape (N, ...): those of each sample."""
MetricValues: TypeAlias = Callable[[Mapping[str, Floats], int], Mapping[str, Floats]]
"""From totals of shape (R, ...) and a number of samples to each metric, (R,): `Task.metric_values`."""
WorstSums: TypeAlias = Callable[[Sums], Sums]
"""From sums of samples to what each adds at its worst, by the names of metrics: `Task.worst_sums`."""


@dataclass(frozen=True, eq=False)
class BootstrapDrop:
    """By how much a model is worse than the baseline in one metric, and the drops of its resamples."""

    drop: float
    num_samples: int
    num_differing: int
    """Samples whose contribution to the metric differs between the two models."""
    num_mistakes: int
    """Those that differ by what compares with `worst_effect`: all of them, where it is not known which do.

    Of a mean over labels, those of the label that may cost most by others.
    """
    worst_effect: float
    """What one sample costs at most; known where `num_mistakes` is below `FEW`, else 0.

    Infinite where the samples can't show a drop: there is only one, or none of them counts, as in an F1 without
    positives.
    """
    acceleration: float
    drops_R: npt.NDArray[np.float32]

    @property
    def is_finite(self) -> bool:
        """Whether the metric has a value in every resample; of a plugin's task it may have none without positives."""
        numbers = np.array([self.drop, self.worst_effect, self.acceleration])
        return bool(np.isfinite(self.drops_R).all() and np.isfinite(numbers).all())

    def limits(self, confidence: float) -> tuple[float, float]:
        """Return the lower and the upper one-sided limit.

        The bias-corrected and accelerated bootstrap: Efron, "Better bootstrap confidence intervals", Journal of the
        American Statistical Association 82 (1987), expanded for small samples (`_expanded_z`). Where few samples are
        mistaken, others may be elsewhere: at least as far out as if those that weren't seen (at that confidence) had
        the worst effect, the upper limit also as if all of them had.
        """
        if not self.is_finite:
            return -math.inf, math.inf
        z = _expanded_z(confidence, self.num_differing)
        low, high = (self._quantile(sign * z) for sign in (-1, 1))
        if self.num_mistakes < FEW:
            num_at_most = self.num_samples * num_differing_limit(self.num_mistakes, self.num_samples, confidence)
            unseen = (num_at_most - self.num_mistakes) * self.worst_effect
            low, high = min(low, self.drop - unseen), max(high, self.drop + unseen, num_at_most * self.worst_effect)
        return min(low, self.drop), max(high, self.drop)

    def p_value(self, margin: float) -> float:
        """Return the smallest 1 - confidence at which the upper limit is below the margin; 1 where none is."""
        if self.drop >= margin:
            return 1.0
        low, high = -12.0, 0.0  # powers of ten
        for _ in range(40):
            middle = (low + high) / 2
            is_below = self.limits(1 - 10**middle)[1] < margin
            low, high = (low, middle) if is_below else (middle, high)
        return float(10**high)

    def num_samples_needed(self, margin: float, confidence: float) -> int | None:
        """Return how many samples decide with 80 % probability, if drop and spread stay; None where no number does."""
        distance = abs(margin - self.drop)
        if distance <= _SMALLEST or not self.is_finite:
            return None
        spread = float(self.drops_R.std(dtype=np.float64))
        factor = (spread * (one_sided_z(confidence) + one_sided_z(_POWER)) / distance) ** 2
        if self.num_mistakes < FEW:
            worst = num_differing_limit(self.num_mistakes, self.num_samples, confidence) * self.worst_effect
            factor = max(factor, self.num_samples * worst / distance)
        return max(1, math.ceil(self.num_samples * factor))

    def _quantile(self, z: float) -> float:
        from scipy import special

        below, equal = (float(np.mean(of)) for of in (self.drops_R < self.drop, self.drops_R == np.float32(self.drop)))
        fraction_below = min(max(below + equal / 2, 1 / len(self.drops_R)), 1 - 1 / len(self.drops_R))
        bias = float(special.ndtri(fraction_below))
        shifted = bias + z
        level = float(special.ndtr(bias + shifted / max(1e-3, 1 - self.acceleration * shifted)))
        return float(np.quantile(self.drops_R.astype(np.float64), level))


def _expanded_z(confidence: float, num_samples: int) -> float:
    """Return the quantile to use in place of the normal one: resamples of few samples vary too little.

    Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69 (2015), section 3.2, with
    the number of samples that differ: of the others, all resamples have the same drop.
    """
    from scipy import special

    number = max(2, num_samples)
    return math.sqrt(number / (number - 1)) * float(special.stdtrit(number - 1, confidence))


def bootstrap_drops(
    baseline: Sums,
    candidates: Sequence[Sums],
    metrics: Sequence[Metric],
    values: MetricValues,
    seed: int,
    worst: WorstSums = lambda _: {},
) -> list[dict[str, BootstrapDrop]]:
    """Return for each candidate the drop of each metric.

    `values`: computes the metrics from totals. The same seed gives the same resamples. `worst`: where it has none for a
    metric that is a fraction, rows of single numbers are at their worst 0, or 1 where lower is better; of other rows,
    one sample may cost all of the metric. For metrics that have no worst value, it is the worst that was seen.
    """
    models = (baseline, *candidates)
    num_samples = len(next(iter(baseline.values())))
    resampled = [list(parts) for parts in zip(*_resampled(models, num_samples, values, seed), strict=True)]
    found = []
    for candidate, parts in zip(candidates, resampled[1:], strict=True):
        pair = _Pair(baseline, candidate, num_samples, values, worst)
        drops = {}
        for metric in metrics:
            sign, name = _sign(metric), metric.name
            drops_R = np.concatenate(
                [sign * (base[name] - own[name]) for base, own in zip(resampled[0], parts, strict=True)]
            )
            drops[name] = pair.drop(metric, drops_R)
        found.append(drops)
    return found


@dataclass
class _Pair:
    """The sums of a baseline and a candidate."""

    baseline: Sums
    candidate: Sums
    num_samples: int
    values: MetricValues
    worst: WorstSums

    def drop(self, metric: Metric, drops_R: Floats) -> BootstrapDrop:
        name, sign = metric.name, _sign(metric)
        own, base = (self.values(totals_of(sums), self.num_samples)[name] for sums in (self.candidate, self.baseline))
        num_differing = self._num_differing(name)
        num_mistakes, worst_effect = self._unseen(metric, num_differing)
        return BootstrapDrop(
            drop=float(sign * (base[0] - own[0])),
            num_samples=self.num_samples,
            num_differing=num_differing,
            num_mistakes=num_mistakes,
            worst_effect=worst_effect,
            acceleration=self._acceleration(name, sign),
            drops_R=drops_R.astype(np.float32),
        )

    @cached_property
    def _totals(self) -> dict[str, Floats]:
        return totals_of(self.baseline)

    def _relevant(self, sums: Sums, name: str) -> Sums:
        """Return the sums that a metric is computed from: that of its name, if there is one."""
        return {name: sums[name]} if name in sums else sums

    def _num_differing(self, name: str) -> int:
        differs_N = np.zeros(self.num_samples, dtype=bool)
        candidate = self._relevant(self.candidate, name)
        for key, rows in self._relevant(self.baseline, name).items():
            differs_N |= (rows != candidate[key]).reshape(self.num_samples, -1).any(axis=1)
        return int(differs_N.sum())

    def _unseen(self, metric: Metric, num_differing: int) -> tuple[int, float]:
        """Return `BootstrapDrop.num_mistakes` and `.worst_effect`."""
        worst = self.worst(self.baseline).get(metric.name)
        if worst is not None and worst.ndim > _LABEL_AXIS:
            return self._unseen_of_labels(metric.name, worst)
        effect = self._worst_effect(metric, num_differing)
        if self.num_samples < 2 or effect <= _SMALLEST:
            return num_differing, math.inf
        return num_differing, effect if num_differing < FEW else 0.0

    def _unseen_of_labels(self, name: str, worst: npt.NDArray[Any]) -> tuple[int, float]:
        """Return the same where a metric is a mean over labels, each of which may show too few samples that differ.

        Their costs add up as squares: Zou and Donner, Statistics in Medicine 27 (2008), equation 3, of labels that err
        independently of each other. The number is that of the most expensive label.
        """
        rows, own = self.baseline[name], self.candidate[name]
        num_differing_K = (rows != own).any(axis=1).sum(axis=0)
        changes = [worst[..., label].astype(np.float64) - rows[..., label] for label in range(len(num_differing_K))]
        if self.num_samples < 2 or all(self._whole_effect(name, *pair) <= _SMALLEST for pair in enumerate(changes)):
            return int(num_differing_K.max()), math.inf
        found = [(0.0, FEW, 1.0)]
        for label, num_differing in enumerate(num_differing_K.tolist()):
            if num_differing < FEW:
                effect = self._effect_of_label(name, label, changes[label], num_differing)
                num_unseen = self._num_at_most(num_differing, _UNSEEN_CONFIDENCE) - num_differing
                cost = min(num_unseen * effect, self._whole_effect(name, label, changes[label]))
                found.append((cost, num_differing, num_unseen))
        _, num_mistakes, num_unseen = max(found)
        return num_mistakes, math.hypot(*(cost for cost, _, _ in found)) / num_unseen

    def _whole_effect(self, name: str, label: int, changes_NS: Floats) -> float:
        """Return what the label costs where every sample is at its worst."""
        return float(self._effects_of_label(name, label, changes_NS.sum(axis=0)[None])[0])

    def _effect_of_label(self, name: str, label: int, changes_NS: Floats, num_differing: int) -> float:
        """Return `_largest_mean_effect` of one label, whose samples are of few kinds."""
        num_at_most = math.ceil(self._num_at_most(num_differing, _EFFECT_CONFIDENCE))
        kinds, counts = np.unique(changes_NS, axis=0, return_counts=True)
        order = np.argsort(-self._effects_of_label(name, label, kinds), kind="stable")
        largest = kinds[order].repeat(np.minimum(counts[order], num_at_most), axis=0)[:num_at_most]
        together = self._effects_of_label(name, label, largest.cumsum(axis=0))
        return float((together / np.arange(1, len(largest) + 1)).max())

    def _effects_of_label(self, name: str, label: int, changes_RS: Floats) -> Floats:
        changes = np.zeros((len(changes_RS), *self.baseline[name].shape[1:]))
        changes[..., label] = changes_RS
        return self._effects(name, {name: changes})

    def _num_at_most(self, num_differing: int, confidence: float) -> float:
        """Return how many of the samples may differ where that many do."""
        return num_differing_limit(num_differing, self.num_samples, confidence) * self.num_samples

    def _worst_effect(self, metric: Metric, num_differing: int) -> float:
        """Return what one of the samples that may differ elsewhere costs at most."""
        name = metric.name
        rows = self._relevant(self.baseline, name)
        worst = self.worst(self.baseline).get(name)
        if worst is None and metric.is_fraction and name in rows and rows[name].ndim == 1:
            worst = np.full(self.num_samples, 0.0 if metric.higher_is_better else 1.0)
        if worst is not None:
            changes = worst.astype(np.float64) - rows[name]
            num_at_most = math.ceil(self._num_at_most(num_differing, _EFFECT_CONFIDENCE))
            return self._largest_mean_effect(name, changes, num_at_most)
        return 1.0 if metric.is_fraction else self._largest_seen_effect(name)

    def _largest_mean_effect(self, name: str, changes: Floats, num_at_most: int) -> float:
        """Return the largest mean effect of up to that many samples, those with the largest effects of their own.

        `changes`: of each sample's sums, (N, ...).
        """
        size = max(1, _MAX_CHUNK_BYTES // (8 * max(1, changes[0].size)))
        parts = [
            self._effects(name, {name: changes[start : start + size]}) for start in range(0, self.num_samples, size)
        ]
        order = np.argsort(-np.concatenate(parts), kind="stable")[:num_at_most]
        together = self._effects(name, {name: changes[order].cumsum(axis=0)})
        return float((together / np.arange(1, len(order) + 1)).max())

    def _largest_seen_effect(self, name: str) -> float:
        """Return the largest effect of one sample's sums in place of another's, of any of the two models."""
        pairs = [self._relevant(sums, name) for sums in (self.baseline, self.candidate)]
        rows = {key: np.concatenate([pair[key] for pair in pairs]).astype(np.float64) for key in pairs[0]}
        flat = np.concatenate([array.reshape(len(array), -1) for array in rows.values()], axis=1)
        _, first = np.unique(flat, axis=0, return_index=True)
        kinds = first[np.linspace(0, len(first) - 1, min(len(first), _MAX_KINDS)).astype(int)]
        removed, added = (chosen.ravel() for chosen in np.meshgrid(kinds, kinds))
        return float(self._effects(name, {key: array[added] - array[removed] for key, array in rows.items()}).max())

    def _effects(self, name: str, changes: Mapping[str, Floats]) -> Floats:
        """Return the size of each change of the baseline's metric, (R,). `changes`: of totals, by name, (R, ...)."""
        totals, num_changes = self._totals, len(next(iter(changes.values())))
        changed = {
            key: total + changes[key] if key in changes else np.broadcast_to(total, (num_changes, *total.shape[1:]))
            for key, total in totals.items()
        }
        before, after = (self.values(of, self.num_samples)[name] for of in (totals, changed))
        return np.asarray(np.abs(after - before))

    def _acceleration(self, name: str, sign: float) -> float:
        """Return the skewness of the samples' influence, by a jackknife that leaves out at most 1,000 groups."""
        num_groups = min(self.num_samples, _MAX_GROUPS)
        group_N = np.arange(self.num_samples) % num_groups
        sizes_G = np.bincount(group_N)
        if num_groups < 2:
            return 0.0
        by_model = []
        for sums in (self.baseline, self.candidate):
            totals, without = totals_of(sums), {}
            for key, rows in sums.items():
                groups = np.zeros((num_groups, *rows.shape[1:]))
                np.add.at(groups, group_N, rows.astype(np.float64))
                without[key] = totals[key] - groups
            by_model.append(self.values(without, self.num_samples - int(sizes_G[0]))[name])
        return acceleration_of(sign * (by_model[0] - by_model[1]))


def _sign(metric: Metric) -> float:
    return 1.0 if metric.higher_is_better else -1.0


def totals_of(sums: Sums) -> dict[str, Floats]:
    """Return the totals over all samples that `Task.metric_values` takes, as the only resample: (1, ...)."""
    return {name: rows.sum(axis=0, dtype=np.float64)[None] for name, rows in sums.items()}


def resample_counts(num_samples: int, seed: int) -> Iterator[Floats]:
    """Yield how often each of `NUM_RESAMPLES` draws has each sample, (R, N), a chunk of resamples at a time."""
    random = np.random.default_rng(seed)
    for first, end in _chunks(NUM_RESAMPLES, 8 * num_samples, _MAX_CHUNK_BYTES):
        counts_RN = np.empty((end - first, num_samples))
        for start, stop in _chunks(len(counts_RN), 8 * num_samples, _CACHE_BYTES):
            drawn_RN = random.integers(0, num_samples, (stop - start, num_samples))
            drawn_RN += np.arange(stop - start)[:, None] * num_samples
            counts_RN[start:stop] = np.bincount(drawn_RN.ravel(), minlength=drawn_RN.size).reshape(drawn_RN.shape)
        yield counts_RN


def jackknife_counts(num_samples: int) -> Iterator[Floats]:
    """Yield how often each sample is there where one of at most 1,000 groups is left out, (G, N), in chunks."""
    num_groups = min(num_samples, _MAX_GROUPS)
    group_N = np.arange(num_samples) % num_groups
    for start, stop in _chunks(num_groups, 8 * num_samples, _MAX_CHUNK_BYTES):
        yield (group_N != np.arange(start, stop)[:, None]).astype(np.float64)


def _chunks(num_rows: int, row_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where chunks of rows start and end."""
    size = max(1, max_bytes // row_bytes)
    return ((start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def acceleration_of(drops_G: Floats) -> float:
    """Return the skewness of the groups' influence from the drops without each of them."""
    influence_G = drops_G.mean() - drops_G
    scale = float((influence_G**2).sum()) ** 1.5
    return float((influence_G**3).sum()) / (6 * scale) if scale > _SMALLEST**3 else 0.0


def _resampled(
    models: Sequence[Sums], num_samples: int, values: MetricValues, seed: int
) -> Iterator[list[Mapping[str, Floats]]]:
    """Yield the metrics of every model, on the same resamples, a chunk of resamples at a time."""
    flat = [{name: rows.reshape(num_samples, -1) for name, rows in sums.items()} for sums in models]
    for counts_RN in resample_counts(num_samples, seed):
        yield [
            values(
                {
                    name: (counts_RN @ rows_NS.astype(np.float64)).reshape(len(counts_RN), *sums[name].shape[1:])
                    for name, rows_NS in of_model.items()
                },
                num_samples,
            )
            for sums, of_model in zip(models, flat, strict=True)
        ]
