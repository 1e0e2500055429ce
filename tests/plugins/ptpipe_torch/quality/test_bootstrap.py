from __future__ import annotations

import time

import numpy as np
import pytest
from scipy import stats

from ptpipe_torch import Metric
from ptpipe_torch.quality import bootstrap
from ptpipe_torch.quality.bootstrap import FEW, bootstrap_drops

F1 = [Metric("f1", higher_is_better=True, is_fraction=True)]


def mean(totals, num_samples):
    return {name: total / num_samples for name, total in totals.items()}


def f1(totals, num_samples):
    """From `right` and `predicted + support`."""
    return {"f1": 2 * totals["f1"][:, 0] / np.maximum(1, totals["f1"][:, 1])}


def f1_sums(predicted_N: np.ndarray, labels_N: np.ndarray) -> dict[str, np.ndarray]:
    counts = np.stack([predicted_N & labels_N, predicted_N.astype(int) + labels_N], axis=1)
    return {"f1": counts.astype(np.uint8)}


def worst_f1(sums):
    """A miss."""
    return {"f1": np.broadcast_to([0, 1], sums["f1"].shape)}


def one(base: np.ndarray, own: np.ndarray, higher_is_better: bool = False, seed: int = 7):
    ((drops),) = bootstrap_drops({"loss": base}, [{"loss": own}], [Metric("loss", higher_is_better)], mean, seed)
    return drops["loss"]


@pytest.mark.parametrize("num_samples", [30, 400])
def test_as_scipy_finds_it(num_samples) -> None:
    random = np.random.default_rng(3)
    base = random.gamma(0.5, size=num_samples)
    own = base + random.gamma(0.3, size=num_samples) - 0.2
    ours = one(base, own)
    expected = stats.bootstrap(
        (own, base),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        paired=True,
        confidence_level=0.9,
        n_resamples=20_000,
        method="BCa",
        random_state=np.random.default_rng(1),
    )
    width = expected.confidence_interval.high - expected.confidence_interval.low
    assert ours.drop == pytest.approx((own - base).mean())
    assert ours.limits(0.95) == pytest.approx(tuple(expected.confidence_interval), abs=0.06 * width)


def test_few_samples_have_the_limits_of_students_t() -> None:
    """Without the expansion the interval of 12 samples is 12 % narrower."""
    half = np.random.default_rng(2).normal(size=6)
    own = np.concatenate([half, -half])
    low, high = one(np.zeros(12), own).limits(0.95)
    expected = 2 * stats.t.ppf(0.95, 11) * stats.sem(own)
    assert high - low == pytest.approx(expected, rel=0.06)
    few = np.concatenate([own, np.zeros(5000)])
    low, high = one(np.zeros(5012), few).limits(0.95)
    assert high - low > 2.05 * stats.norm.ppf(0.95) * stats.sem(few), "what counts is how many differ"


def test_the_same_seed_gives_the_same_bytes_and_chunks_change_nothing(monkeypatch) -> None:
    random = np.random.default_rng(0)
    base, own = random.normal(size=(2, 50))
    first = one(base, own)
    assert (one(base, own).drops_R == first.drops_R).all()
    assert (one(base, own, seed=8).drops_R != first.drops_R).any()
    monkeypatch.setattr(bootstrap, "_MAX_CHUNK_BYTES", 8 * 50 * 130)
    assert (one(base, own).drops_R == first.drops_R).all()


def test_direction() -> None:
    random = np.random.default_rng(0)
    base, own = random.normal(size=(2, 200))
    higher, lower = one(base, own, higher_is_better=True), one(base, own)
    assert higher.drop == pytest.approx(-lower.drop) == pytest.approx(base.mean() - own.mean())
    low, high = lower.limits(0.95)
    assert higher.limits(0.95) == pytest.approx((-high, -low), abs=0.02)


def test_the_estimate_is_inside_and_a_higher_confidence_is_wider() -> None:
    random = np.random.default_rng(0)
    drop = one(*random.normal(size=(2, 60)))
    (low, high), (wider_low, wider_high) = drop.limits(0.9), drop.limits(0.99)
    assert wider_low < low < drop.drop < high < wider_high


def test_the_p_value_is_where_the_limit_passes_the_margin() -> None:
    drop = one(*np.random.default_rng(0).normal(size=(2, 60)))
    for confidence in (0.8, 0.95, 0.99):
        margin = drop.limits(confidence)[1]
        assert drop.p_value(margin) == pytest.approx(1 - confidence, rel=0.05)
    assert drop.p_value(drop.drop) == 1


def noisy_f1(random: np.random.Generator, num_samples: int, flip: float) -> tuple[dict, dict]:
    """A model that finds 95 % of a class of 13 %, and one that changes some of its answers, right ones less often."""
    labels_N = random.random(num_samples) < 0.13
    base_N = np.where(labels_N, random.random(num_samples) > 0.05, random.random(num_samples) < 0.005)
    own_N = base_N ^ (random.random(num_samples) < np.where(base_N == labels_N, flip, 5 * flip))
    return f1_sums(base_N, labels_N), f1_sums(own_N, labels_N)


@pytest.mark.parametrize(("num_samples", "flip"), [(557, 0.005), (557, 0.02), (2000, 0.02)])
def test_an_f1_is_passed_in_at_most_a_tenth_where_its_drop_is_the_margin(num_samples, flip, monkeypatch) -> None:
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 500)
    random = np.random.default_rng(5)
    big_base, big_own = noisy_f1(random, 2_000_000, flip)
    truth = float(np.subtract(*(f1({"f1": sums["f1"].sum(0)[None]}, 1)["f1"][0] for sums in (big_base, big_own))))
    limits = []
    for seed in range(200):
        base, own = noisy_f1(random, num_samples, flip)
        ((drops),) = bootstrap_drops(base, [own], F1, f1, seed, worst_f1)
        limits.append(drops["f1"].limits(0.95))
    low, high = np.array(limits).T
    assert np.mean(high < truth) <= 0.09  # 5 % in the limit; 8 % of 1,000 at the smallest of these
    assert np.mean(low > truth) <= 0.09


def test_models_that_never_differ_are_not_taken_for_equal() -> None:
    labels_N = np.arange(500) % 8 == 0
    base = f1_sums(labels_N & (np.arange(500) != 8), labels_N)
    ((drops),) = bootstrap_drops(base, [base], F1, f1, 7, worst_f1)
    drop = drops["f1"]
    assert (drop.drop, drop.num_differing) == (0, 0) and not drop.drops_R.any()
    # By the rule of three up to 3 of 500 samples differ elsewhere; one that is lost costs 2 / 125 of F1 at most.
    low, high = drop.limits(0.95)
    assert -low == high == pytest.approx(3 * drop.worst_effect, rel=0.01)
    assert 0.005 < drop.worst_effect < 0.02
    needed = drop.num_samples_needed(0.01, 0.95)
    assert needed == pytest.approx(500 * high / 0.01, rel=0.01)


def test_two_models_without_a_mistake_are_not_shown_to_be_equal() -> None:
    """20 samples, 8 of the class: up to 2.8 of 20 may differ elsewhere, and 3 that are missed cost 3 / 13 of F1."""
    labels_N = np.arange(20) < 8
    right = f1_sums(labels_N, labels_N)
    ((drops),) = bootstrap_drops(right, [right], F1, f1, 7, worst_f1)
    low, high = drops["f1"].limits(0.95)
    assert high == -low >= 2.78 / 13
    assert drops["f1"].p_value(0.0001) > 0.9
    assert drops["f1"].p_value(0.9) < 0.05


@pytest.mark.parametrize(("num_samples", "positives", "recall"), [(100, 0.1, 0.9), (200, 0.05, 0.85)])
def test_what_a_perfect_baseline_never_showed_is_not_passed(num_samples, positives, recall, monkeypatch) -> None:
    """Without the worst outcome, 25 to 32 % passed."""
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 200)
    random = np.random.default_rng(5)
    truth = 1 - 2 * recall / (recall + 1)
    passed = 0
    for seed in range(100):
        labels_N = random.random(num_samples) < positives
        base, own = (f1_sums(of, labels_N) for of in (labels_N, labels_N & (random.random(num_samples) < recall)))
        ((drops),) = bootstrap_drops(base, [own], F1, f1, seed, worst_f1)
        passed += drops["f1"].limits(0.95)[1] < truth
    assert passed <= 5


def test_few_positives_cost_more_together_than_each_alone() -> None:
    """Of 4 positives that are all found, one that is missed costs 1 / 7, and all of them 1."""
    labels_N = np.arange(1000) < 4
    right = f1_sums(labels_N, labels_N)
    ((drops),) = bootstrap_drops(right, [right], F1, f1, 7, worst_f1)
    assert drops["f1"].worst_effect == pytest.approx(1 / 4)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_fraction_that_is_a_mean_is_at_its_worst_0_or_1(higher_is_better) -> None:
    rows_N = np.full(50, 0.9 if higher_is_better else 0.1)
    metric = Metric("loss", higher_is_better, is_fraction=True)
    ((drops),) = bootstrap_drops({"loss": rows_N}, [{"loss": rows_N}], [metric], mean, 7)
    assert drops["loss"].worst_effect == pytest.approx(0.9 / 50)


def test_a_fraction_of_which_nothing_else_is_known_may_be_lost_by_one_sample() -> None:
    labels_N = np.arange(500) % 8 == 0
    right = f1_sums(labels_N, labels_N)
    ((drops),) = bootstrap_drops(right, [right], F1, f1, 7)
    assert drops["f1"].worst_effect == 1 and drops["f1"].p_value(0.5) > 0.5


@pytest.mark.parametrize(
    ("base", "own"), [([1.0], [0.5]), ([0.0] * 40, [0.0] * 40), ([2.0] * 40, [2.0] * 40)], ids=["one", "0", "same"]
)
def test_samples_that_can_show_no_drop_decide_nothing(base, own) -> None:
    drop = one(np.array(base), np.array(own))
    assert drop.limits(0.95) == (-np.inf, np.inf) and not drop.is_finite
    assert drop.p_value(100.0) == 1 and drop.num_samples_needed(100.0, 0.95) is None


def test_many_samples_that_differ_need_no_worst_case() -> None:
    drop = one(*np.random.default_rng(0).normal(size=(2, 60)))
    assert (drop.num_differing, drop.worst_effect) == (60, 0) and FEW <= 60


def test_the_number_of_samples_decides_in_most_cases() -> None:
    random = np.random.default_rng(0)
    base = random.normal(size=400)
    own = base + random.normal(0.02, 0.5, size=400)
    pilot = one(base, own)
    margin = pilot.drop + 0.05
    needed = pilot.num_samples_needed(margin, 0.95)
    assert needed == pytest.approx((0.5 * (1.645 + 0.842) / 0.05) ** 2, rel=0.15)
    assert pilot.num_samples_needed(pilot.drop, 0.95) is None


def test_sums_without_the_metrics_name_all_count() -> None:
    values = lambda totals, n: {"ratio": totals["a"] / totals["b"][:, 0]}  # noqa: E731
    random = np.random.default_rng(0)
    base = {"a": random.random(40), "b": np.ones((40, 1))}
    own = base | {"b": np.where(np.arange(40) < 30, 1.0, 1.1)[:, None]}
    ((drops),) = bootstrap_drops(base, [own], [Metric("ratio", True)], values, 7)
    assert drops["ratio"].num_differing == 10
    low, high = drops["ratio"].limits(0.95)
    assert 0 < low < drops["ratio"].drop < high


def test_many_samples_take_about_a_second() -> None:
    random = np.random.default_rng(0)
    base, *others = random.normal(size=(5, 10_000))
    started = time.process_time()
    bootstrap_drops({"loss": base}, [{"loss": own} for own in others], [Metric("loss", False)], mean, 7)
    assert time.process_time() - started < 6  # 0.6 s on an idle machine


MACRO_F1 = [Metric("macro_f1", higher_is_better=True, is_fraction=True)]


def macro_f1(totals, num_samples):
    """The mean over labels, from `right` and `predicted + support`, (R, 2, K)."""
    right_RK, counted_RK = totals["macro_f1"].swapaxes(0, 1)
    return {"macro_f1": (2 * right_RK / np.maximum(1, counted_RK)).mean(axis=1)}


def macro_drop(base: list[np.ndarray], own: list[np.ndarray], seed: int = 7):
    """Of `f1_sums` by label."""
    pair = [{"macro_f1": np.stack(sums, axis=2)} for sums in (base, own)]

    def worst(sums):
        return {"macro_f1": np.broadcast_to([[0], [1]], sums["macro_f1"].shape)}

    ((drops),) = bootstrap_drops(pair[0], [pair[1]], MACRO_F1, macro_f1, seed, worst)
    return drops["macro_f1"]


@pytest.mark.parametrize("num_missed", [0, 4, 20])
def test_the_mean_of_one_label_has_the_interval_of_its_f1(num_missed: int) -> None:
    labels_N = np.arange(600) < 60
    right, missed = f1_sums(labels_N, labels_N), f1_sums(labels_N & (np.arange(600) >= num_missed), labels_N)
    ((drops),) = bootstrap_drops(right, [missed], F1, f1, 7, worst_f1)
    of_mean = macro_drop([right["f1"]], [missed["f1"]])
    assert of_mean.limits(0.95) == pytest.approx(drops["f1"].limits(0.95), abs=1e-6)
    assert (of_mean.num_mistakes, of_mean.num_differing) == (min(num_missed, FEW), num_missed)


def test_labels_that_no_sample_was_mistaken_of_add_up_as_squares() -> None:
    labels_N = np.arange(600) < 60
    sums, often = f1_sums(labels_N, labels_N)["f1"], f1_sums(np.arange(600) % 2 > 0, np.arange(600) % 3 > 0)["f1"]
    alone, two = macro_drop([sums], [sums]), macro_drop([sums, sums], [sums, sums])
    assert two.limits(0.95)[1] == pytest.approx(alone.limits(0.95)[1] * np.sqrt(2) / 2)
    flipped = often[np.r_[20:600, 0:20]]
    with_other = macro_drop([sums, often], [sums, flipped])
    assert with_other.num_differing > FEW and with_other.num_mistakes == 0
    assert with_other.limits(0.95)[1] - with_other.drop >= alone.limits(0.95)[1] / 2 - 1e-9


def test_a_rare_label_beside_a_frequent_one_seldom_passes_at_its_margin(monkeypatch) -> None:
    """Of ten samples with the rare label one is missed, or in a third of all draws none: as many passed before."""
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 300)
    num_samples, recall, num_passed = 500, 0.9, 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        labels = [random.random(num_samples) < fraction for fraction in (0.02, 0.5)]
        found = [of & (random.random(num_samples) < recall) for of in labels]
        base = [f1_sums(of, of)["f1"] for of in labels]
        own = [f1_sums(*pair)["f1"] for pair in zip(found, labels, strict=True)]
        num_passed += macro_drop(base, own, seed).limits(0.95)[1] < 1 - 2 * recall / (1 + recall)
    assert num_passed <= 8


def test_a_mean_over_labels_that_nothing_has_shows_nothing() -> None:
    nothing, one = np.zeros((50, 2), np.uint8), f1_sums(np.ones(1, bool), np.ones(1, bool))["f1"]
    for sums in ([nothing, nothing], [one, one]):
        assert macro_drop(sums, sums).limits(0.95) == (-np.inf, np.inf)
