"""Intervals for how much worse the area under the ROC curve and the average precision are.

Those of `bootstrap`, whose resamples are the same; here, a metric of a resample is computed from all its scores.

Shape legend: N samples, L labels, R resamples, A metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ptpipe_torch.quality.bootstrap import (
    FEW,
    BootstrapDrop,
    Floats,
    acceleration_of,
    jackknife_counts,
    resample_counts,
)
from ptpipe_torch.task.ranking import RANKING_ROWS, Ranking

_NONE_SEEN = 3
"""Mistakes that are possible where none is seen: the rule of three."""
_BLOCK_RESAMPLES = 64
"""That are computed at a time."""

Rows = npt.NDArray[np.float32]


def ranking_drops(baseline: Rows, candidates: Sequence[Rows], seed: int) -> list[dict[str, BootstrapDrop]]:
    """Return for each candidate the drops of the metrics of a ranking.

    `baseline`, `candidates`: `Task.label_scores` of the same samples. The same seed gives the same resamples.
    """
    num_samples = len(baseline)
    has_NL = baseline[..., 1] > 0
    rankings = [Ranking(rows) for rows in (baseline, *candidates)]
    of_all = _values(rankings, [np.ones((num_samples, 1))])
    resampled = _values(rankings, _blocks(resample_counts(num_samples, seed)))
    left_out = _values(rankings, _blocks(jackknife_counts(num_samples)))
    found = []
    for model, ranking in enumerate(rankings[1:], start=1):
        num_mistakes_L2 = _num_mistakes(rankings[0], ranking, has_NL)
        drops = {}
        for name, effect_L2 in _worst_effects(rankings[0].supports).items():
            drop, drops_R, drops_G = (of[0][name] - of[model][name] for of in (of_all, resampled, left_out))
            num_mistakes, worst_effect = _unseen(num_mistakes_L2, effect_L2, has_NL, drops_G - drop)
            drops[name] = BootstrapDrop(
                drop=float(drop[0]),
                num_samples=num_samples,
                num_differing=_num_effective(drops_G - drop),
                num_mistakes=num_mistakes,
                worst_effect=worst_effect,
                acceleration=acceleration_of(drops_G),
                drops_R=drops_R.astype(np.float32),
            )
        found.append(drops)
    return found


def _blocks(chunks: Iterable[Floats]) -> Iterator[npt.NDArray[np.floating]]:
    """Yield counts of chunks by samples, (N, R)."""
    for counts_RN in chunks:
        dtype = np.float32 if counts_RN.shape[1] <= 1 << 24 else np.float64  # float32 has all whole numbers up to there
        for start in range(0, len(counts_RN), _BLOCK_RESAMPLES):
            yield np.ascontiguousarray(counts_RN[start : start + _BLOCK_RESAMPLES].T, dtype=dtype)


def _values(rankings: Sequence[Ranking], blocks: Iterable[npt.NDArray[np.floating]]) -> list[dict[str, Floats]]:
    """Return the metrics of every model, (R,). `blocks`: how often each resample has each sample, (N, R)."""
    parts = [[ranking.values(counts_NR) for ranking in rankings] for counts_NR in blocks]
    return [{name: np.concatenate([part[name] for part in own]) for name in own[0]} for own in zip(*parts, strict=True)]


def _num_mistakes(one: Ranking, other: Ranking, has_NL: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return how many samples with and without each label passed a quarter of those of the other kind, (L, 2).

    That is half of what one does that looks like them.
    """
    moved_NL = np.abs(one.placements() - other.placements())  # twice the number that was passed
    num_others_NL = np.where(has_NL, one.supports[:, 1], one.supports[:, 0])
    is_mistake_NL = (moved_NL > 0) & (2 * moved_NL >= num_others_NL)
    return np.stack([(is_mistake_NL & has_NL).sum(axis=0), (is_mistake_NL & ~has_NL).sum(axis=0)], axis=1)


def _worst_effects(supports_L2: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """Return of each metric what a sample with, and one without, each label costs at its worst, (L, 2); NaN: no value.

    `supports_L2`: how many there are. At its worst, a sample looks like one of the other kind, as where F1 counts a
    positive that is missed: with a score drawn from theirs, it is in front of half of them. In front of a random sample
    of P with the label, one without it lowers the k-th precision by 1 / (k + 1) with a probability of k / (P + 1),
    hence the average by less than 1 / P; one with it that falls behind loses its own precision.
    """
    effects_AL2 = np.full((2, *supports_L2.shape), np.nan)
    has_both_L = supports_L2.min(axis=1) > 0
    effects_AL2[0, has_both_L] = 1 / (2 * supports_L2[has_both_L])
    effects_AL2[1, has_both_L] = 1 / supports_L2[has_both_L, :1]
    return {name: effects_AL2[row] for name, row in RANKING_ROWS.items()}


def _num_effective(influence_G: Floats) -> int:
    """Return how many samples make up the drop: many may move by next to nothing. `influence_G`: of groups, on it."""
    largest = np.abs(influence_G).max()
    if not largest > 0:
        return 0
    squares_G = (influence_G / largest) ** 2
    return round(float(squares_G.sum() ** 2 / (squares_G**2).sum()))


def _unseen(
    num_mistakes_L2: npt.NDArray[np.int64], effect_L2: Floats, has_NL: npt.NDArray[np.bool_], influence_G: Floats
) -> tuple[int, float]:
    """Return `BootstrapDrop.num_mistakes` and `.worst_effect`. `influence_G`: of groups of samples on the drop.

    Samples with a label and those without it are two draws, and either may show too few mistakes, whatever else moves
    by a little. Where a handful make up the drop, the largest effect may be worse than that of a mistake.
    """
    is_known_L2 = np.isfinite(effect_L2)
    if not is_known_L2.any():
        return 0, math.inf
    is_few_L2 = is_known_L2 & (num_mistakes_L2 < FEW)
    few_L2 = np.where(is_few_L2, effect_L2, 0.0)
    costs_L2 = few_L2 * (num_mistakes_L2 + _NONE_SEEN)
    worst = np.where(has_NL, few_L2[:, 0], few_L2[:, 1]).sum(axis=1).max() / is_known_L2.any(axis=1).sum()
    found = [(int(num_mistakes_L2.flat[costs_L2.argmax()]), float(worst))]
    num_effective = _num_effective(influence_G)
    if num_effective < FEW:
        found.append((num_effective, float(np.abs(influence_G).max())))
    return max(found, key=lambda pair: (pair[0] + _NONE_SEEN) * pair[1])
