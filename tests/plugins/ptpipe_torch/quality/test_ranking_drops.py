"""Intervals of the area under the ROC curve and the average precision. Shape legend: N samples, P with the label."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score

from ptpipe_torch.quality import bootstrap
from ptpipe_torch.quality.bootstrap import BootstrapDrop
from ptpipe_torch.quality.ranking_drops import ranking_drops
from ptpipe_torch.task.ranking import Ranking


def rows(scores_N: npt.NDArray[np.floating], has_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    return np.stack([scores_N, has_N], axis=1)[:, None].astype(np.float32)


def models(num: int, fraction: float, noise: float, seed: int) -> tuple[npt.NDArray[np.float32], ...]:
    """Scores of two models that overlap, of which the second one is worse."""
    random = np.random.default_rng(seed)
    has_N = random.random(num) < fraction
    base_N = random.normal(size=num) + 1.5 * has_N
    return rows(base_N, has_N), rows(base_N + noise * random.normal(size=num), has_N)


def drop_of(base: npt.NDArray[np.float32], own: npt.NDArray[np.float32], metric: str, seed: int = 7) -> BootstrapDrop:
    ((drops),) = ranking_drops(base, [own], seed)
    return drops[metric]


def of_resamples(drop: BootstrapDrop) -> BootstrapDrop:
    """Return the drop without the limit for mistakes that weren't seen."""
    return replace(drop, worst_effect=0.0)


def delong(base: npt.NDArray[np.float32], own: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Return the drop of the area and its standard error: DeLong, DeLong and Clarke-Pearson (1988), section 3."""
    has_N = base[:, 0, 1] > 0
    placements = []
    for of in (base, own):
        found_P, others_Q = of[has_N, 0, 0], of[~has_N, 0, 0]
        kernel_PQ = (found_P[:, None] > others_Q) + 0.5 * (found_P[:, None] == others_Q)
        placements.append((kernel_PQ.mean(axis=1), kernel_PQ.mean(axis=0)))
    of_found, of_others = (np.subtract(*pair) for pair in zip(*placements, strict=True))
    variance = of_found.var(ddof=1) / len(of_found) + of_others.var(ddof=1) / len(of_others)
    return float(of_found.mean()), float(np.sqrt(variance))


@pytest.mark.parametrize(("num", "fraction"), [(400, 0.2), (3000, 0.05)])
def test_the_interval_of_the_area_is_that_of_delong(num: int, fraction: float) -> None:
    base, own = models(num, fraction, 0.7, seed=3)
    drop, error = delong(base, own)
    found = drop_of(base, own, "roc_auc")
    assert found.drop == pytest.approx(drop, abs=1e-12) and found.drop > 0
    assert found.drops_R.std() == pytest.approx(error, rel=0.06)
    low, high = of_resamples(found).limits(0.95)
    assert low < drop < high
    assert 0.97 < (high - low) / (2 * error * stats.norm.ppf(0.95)) < 1.15, "Student's quantile, of those that differ"


def test_the_interval_of_the_precision_is_scipys() -> None:
    base, own = models(300, 0.2, 0.7, seed=4)

    def precision_drop(index_N: npt.NDArray[np.int64]) -> float:
        pair = (average_precision_score(of[index_N, 0, 1], of[index_N, 0, 0]) for of in (base, own))
        return float(np.subtract(*pair))

    expected = stats.bootstrap(
        (np.arange(300),),
        precision_drop,
        confidence_level=0.9,
        n_resamples=2000,
        vectorized=False,
        random_state=np.random.default_rng(1),
    ).confidence_interval
    found = drop_of(base, own, "average_precision")
    assert found.drop == pytest.approx(precision_drop(np.arange(300)), abs=1e-12)
    assert of_resamples(found).limits(0.95) == pytest.approx(tuple(expected), abs=0.15 * (expected.high - expected.low))


def test_the_same_seed_gives_the_same_bytes_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, own = models(60, 0.3, 0.5, seed=5)
    for metric in ("roc_auc", "average_precision"):
        first = drop_of(base, own, metric)
        assert (drop_of(base, own, metric).drops_R == first.drops_R).all()
        assert (drop_of(base, own, metric, seed=8).drops_R != first.drops_R).any()
        with monkeypatch.context() as patched:
            patched.setattr(bootstrap, "_MAX_CHUNK_BYTES", 8 * 60 * 13)
            patched.setattr(bootstrap, "_CACHE_BYTES", 8 * 60 * 4)
            again = drop_of(base, own, metric)
        assert (again.drops_R == first.drops_R).all() and again.acceleration == pytest.approx(first.acceleration)


def test_several_candidates_have_the_drops_of_each() -> None:
    base, own = models(80, 0.3, 0.5, seed=6)
    both = ranking_drops(base, [own, base], 7)
    assert (both[0]["roc_auc"].drops_R == drop_of(base, own, "roc_auc").drops_R).all()
    assert both[1]["roc_auc"].drop == 0 and not both[1]["roc_auc"].drops_R.any()


@pytest.mark.parametrize("metric", ["roc_auc", "average_precision"])
def test_perfect_models_are_not_shown_to_be_equal(metric: str) -> None:
    """Their scores differ everywhere, their order nowhere: no resample has a drop."""
    random = np.random.default_rng(1)
    has_N = np.arange(200) < 40
    base, own = (rows(9 * has_N + random.normal(size=200), has_N) for _ in range(2))
    found = drop_of(base, own, metric)
    assert found.drop == 0 and not found.drops_R.any() and found.num_mistakes == 0
    low, high = found.limits(0.95)
    effect = 1 / 40 if metric == "average_precision" else 1 / 80
    assert -low == high == pytest.approx(200 * (1 - 0.05 ** (1 / 200)) * effect, rel=0.15)
    assert found.p_value(0.001) > 0.9


@pytest.mark.parametrize("sign", [1, -1])
def test_one_sample_out_of_place_shows_no_more_than_one(sign: int) -> None:
    """One of the others in front of forty positives moves all of them: none of those is mistaken."""
    has_N = np.arange(1000) < 40
    base_N = np.where(has_N, 2000.0, 0.0) + np.arange(1000)
    own_N = np.where(np.arange(1000) == 999, 5000.0, base_N)
    kind_N = has_N if sign > 0 else ~has_N
    found = drop_of(rows(sign * base_N, kind_N), rows(sign * own_N, kind_N), "roc_auc")
    assert found.drop == pytest.approx(1 / 960) and (found.num_differing, found.num_mistakes) == (1, 0)
    assert found.worst_effect == pytest.approx(1 / (2 * 40))


@pytest.mark.parametrize("metric", ["roc_auc", "average_precision"])
def test_noise_shows_nothing_of_rare_mistakes(metric: str) -> None:
    """Of 100 positives, 3 may be mistaken elsewhere, whatever else moves by a little."""
    random, has_N = np.random.default_rng(1), np.arange(2000) < 100
    base_N = random.normal(size=2000) + 2 * has_N
    drops = [
        drop_of(rows(base_N, has_N), rows(base_N + noise * random.normal(size=2000), has_N), metric)
        for noise in (0, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    ]
    highs = [drop.limits(0.95)[1] for drop in drops]
    worst = 1 / 200 if metric == "roc_auc" else 1 / 100
    assert highs[0] == pytest.approx(2000 * (1 - 0.05 ** (1 / 2000)) * worst)
    assert np.diff(highs).min() > -1e-4 and highs[2] < 1.01 * highs[0]
    for drop in drops[:4]:
        low, high = drop.limits(0.95)
        assert high >= drop.drop + 2.99 * worst and low <= drop.drop - 2.99 * worst


@pytest.mark.parametrize("mistaken", [0.01, 0.02])
def test_a_drop_of_rare_mistakes_is_seldom_above_the_limit(mistaken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 positives, one or two are expected to look like others: 37 % and 14 % of draws have none."""
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 300)

    def draw(num: int, random: np.random.Generator) -> list[npt.NDArray[np.float32]]:
        has_N = np.arange(num) < num / 10
        base_N = random.normal(size=num) + 3 * has_N
        is_mistaken_N = has_N & (random.random(num) < mistaken)
        own_N = np.where(is_mistaken_N, random.normal(size=num), base_N + 0.02 * random.normal(size=num))
        return [rows(base_N, has_N), rows(own_N, has_N)]

    large = [Ranking(of).values(np.ones((200_000, 1))) for of in draw(200_000, np.random.default_rng(0))]
    passed = {"roc_auc": 0, "average_precision": 0}
    for seed in range(60):
        base, own = draw(1000, np.random.default_rng(seed))
        drops = ranking_drops(base, [own], 7)[0]
        for metric in passed:
            passed[metric] += drops[metric].limits(0.95)[1] < float((large[0][metric] - large[1][metric])[0])
    assert max(passed.values()) <= 6, "3 are expected at most, and 7 are once in 30 times"


@pytest.mark.parametrize("has_N", [np.zeros(50, bool), np.ones(50, bool)])
def test_samples_of_one_kind_show_nothing(has_N: npt.NDArray[np.bool_]) -> None:
    random = np.random.default_rng(2)
    pair = [rows(random.normal(size=50), has_N) for _ in range(2)]
    for metric in ("roc_auc", "average_precision"):
        found = drop_of(*pair, metric)
        assert not found.is_finite and found.limits(0.95) == (-np.inf, np.inf) and found.p_value(1.0) == 1


def test_labels_that_only_few_samples_show_count_with_their_worst() -> None:
    random = np.random.default_rng(3)
    has_NL = np.stack([random.random(300) < 0.3, np.arange(300) < 30, np.zeros(300, bool)], axis=1)
    base_NL = random.normal(size=(300, 3)) + has_NL * (1.0, 20.0, 0.0)
    own_NL = base_NL + (1.5, 0.0, 0.0) * random.normal(size=(300, 3))
    base, own = (np.stack([scores_NL, has_NL], axis=2).astype(np.float32) for scores_NL in (base_NL, own_NL))
    ((drops),) = ranking_drops(base, [own], 7)
    assert drops["roc_auc"].num_mistakes == 0
    assert drops["roc_auc"].worst_effect == pytest.approx(1 / (2 * 30) / 2), "of two labels that have a value"
    ((drops),) = ranking_drops(base[:, [0, 2]], [own[:, [0, 2]]], 7)
    assert (
        min(drops["roc_auc"].num_differing, drops["roc_auc"].num_mistakes) > 10 and drops["roc_auc"].worst_effect == 0
    )


def test_a_handful_of_samples_that_make_up_the_drop_are_the_number_that_differ() -> None:
    """Three positives are taken for others; hundreds of samples change places by next to nothing."""
    base, own = models(2000, 0.1, 0.0, seed=8)
    random, number_N = np.random.default_rng(8), base[:, 0, 1].argsort()[-3:]
    own = base + np.stack([0.01 * random.normal(size=(2000, 1)), np.zeros((2000, 1))], axis=2)
    own[number_N, 0, 0] = -4
    found = drop_of(base, own, "roc_auc")
    assert 2 <= found.num_differing <= 3 == found.num_mistakes
    assert found.worst_effect == pytest.approx(found.drop / 3, rel=0.5)
    assert found.limits(0.95)[1] > 1.5 * found.drop
    own[number_N, 0, 0] = base[number_N, 0, 0]
    found = drop_of(base, own, "roc_auc")
    assert found.num_differing >= 10 and found.num_mistakes == 0
    assert found.limits(0.95)[1] == pytest.approx(found.drop + 3 / (2 * base[:, 0, 1].sum()), rel=0.01)


@pytest.mark.slow
def test_a_drop_as_large_as_the_margin_seldom_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A perfect baseline, and a candidate that takes 10 % of the positives for others."""
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 300)
    random, passed = np.random.default_rng(9), {"roc_auc": 0, "average_precision": 0}

    def draw(num: int) -> list[npt.NDArray[np.float32]]:
        has_N = random.random(num) < 0.1
        base_N = random.normal(size=num) + 12 * has_N
        own_N = np.where(has_N & (random.random(num) < 0.1), random.normal(size=num), base_N)
        return [rows(base_N, has_N), rows(own_N, has_N)]

    base, own = draw(100_000)
    truth = {metric: drop_of(base, own, metric).drop for metric in passed}
    assert truth["roc_auc"] == pytest.approx(0.05, abs=0.01)
    for seed in range(100):
        base, own = draw(300)
        drops = ranking_drops(base, [own], seed)[0]
        for metric in passed:
            passed[metric] += drops[metric].limits(0.95)[1] < truth[metric]
    assert max(passed.values()) <= 9, "5 are expected at most, and 10 are once in 35 times"
