"""Estimates from made-up durations, whose truth is known.

Shape legend: S starts, M models and the control, R rounds of a start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from ptpipe_eval.latency.estimate import Block, CellEstimate, Round, calls_needed, estimate_cell, is_precise

NUM_CALLS = 8


def measured(
    times_ms: Sequence[float],
    rng: np.random.Generator,
    *,
    num_starts: int = 10,
    num_rounds: int = 6,
    process_sd: float = 0.01,
    round_sd: float = 0.02,
    slow_moments: float = 0.05,
) -> list[Round]:
    """Return rounds of models that take this long, each process and block a little more or less, some 1.6 times."""
    truth_M = np.array([*times_ms, times_ms[0]])
    rounds = []
    for start in range(num_starts):
        process_M = rng.normal(0, process_sd, len(truth_M))
        for _ in range(num_rounds):
            noise_M = process_M + rng.normal(0, round_sd, len(truth_M)) + rng.normal(0, 0.05)
            slow_M = np.where(rng.random(len(truth_M)) < slow_moments, 1.6, 1.0)
            blocks_ns = truth_M * np.exp(noise_M) * slow_M * 1e6
            rounds.append(Round(start, tuple(block(int(ns)) for ns in blocks_ns)))
    return rounds


def block(call_ns: int, waited_fraction: float | None = 0.0, num_calls: int = NUM_CALLS) -> Block:
    total_ns = num_calls * call_ns
    waited_ns = None if waited_fraction is None else int(waited_fraction * total_ns)
    return Block([call_ns] * num_calls, total_ns, waited_ns)


def sessions(times_ms: Sequence[float], number: int, **options: float) -> list[CellEstimate]:
    rng = np.random.default_rng(11)
    return [estimate_cell(measured(times_ms, rng, **options), 0, 1) for _ in range(number)]


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("num_starts", [3, 5, 15])
def test_intervals_hold_the_true_ratio_as_often_as_they_say(num_starts: int) -> None:
    truths = (1.0, 0.5, 1.03)
    cells = sessions(truths, 1000, num_starts=num_starts)
    for position, truth in enumerate(truths[1:], 1):
        held = [own.ratio.low <= truth <= own.ratio.high for own in (cell.models[position] for cell in cells)]
        assert 0.93 <= np.mean(held) <= 0.98  # 1000 sessions: +- 0.014


def test_a_start_that_something_slowed_does_not_decide_the_mean() -> None:
    quiet = [Round(start, (block(1000 + start), block(1030), block(1000 + start))) for start in range(12)]
    slowed = [*quiet[:-1], Round(11, (block(1011), block(3000), block(1011)))]
    one, other = (estimate_cell(rounds, 0, 1).models[1].ratio for rounds in (quiet, slowed))
    assert other.value == pytest.approx(one.value, rel=0.002)
    assert other.high / other.low < 1.02


def test_identical_models_are_hardly_ever_told_apart() -> None:
    cells = sessions((1.0, 1.0), 400, num_starts=5)
    claims = [cell.models[1].verdict for cell in cells if cell.models[1].verdict != "same within noise"]
    assert len(claims) <= 0.05 * 400


def test_a_slowdown_of_three_percent_is_found() -> None:
    cells = sessions((1.0, 1.03), 100, num_starts=14)
    assert np.mean([cell.models[1].verdict == "slower" for cell in cells]) >= 0.9
    assert not any(cell.models[1].verdict == "faster" for cell in cells)


def test_the_baseline_is_compared_with_nothing() -> None:
    (cell,) = sessions((2.0, 1.0), 1)
    assert [own.verdict for own in cell.models] == ["baseline", "faster"]
    assert cell.models[0].ratio.low == cell.models[0].ratio.high == 1
    assert cell.models[0].median_ms.value == pytest.approx(2.0, rel=0.05)
    assert cell.models[1].ratio.value == pytest.approx(0.5, rel=0.03)


def test_noise_is_what_two_copies_of_the_baseline_show() -> None:
    quiet, noisy = (sessions((1.0, 1.0), 1, process_sd=sd, slow_moments=0)[0].noise for sd in (0.0, 0.03))
    assert 0 < quiet < 0.03 < noisy


@pytest.mark.parametrize("waited_fraction", [0.0, 0.3])
def test_disturbed_rounds_are_left_out(waited_fraction: float) -> None:
    rounds = [Round(start, (block(100), block(100), block(100))) for start in range(5)]
    rounds += [Round(start, (block(100), block(105, waited_fraction), block(100))) for start in range(5)]
    cell = estimate_cell(rounds, 0, 1)
    if waited_fraction:
        assert (cell.num_rounds, cell.num_disturbed) == (5, 5)
        assert cell.models[1].ratio.value == pytest.approx(1)
    else:
        assert (cell.num_rounds, cell.num_disturbed) == (10, 0)
        assert cell.models[1].ratio.value == pytest.approx(1.05**0.5)  # each start's median of both


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_round_with_a_block_slower_than_its_processs_others_is_left_out(position: int) -> None:
    slow = [block(150 if model == position else 100) for model in range(3)]
    blocks_of_a_start = [(block(100),) * 3] * 4 + [tuple(slow)]
    rounds = [Round(start, blocks) for start in range(3) for blocks in blocks_of_a_start]
    cell = estimate_cell(rounds, 0, 1)
    assert (cell.num_rounds, cell.num_disturbed) == (12, 3)
    assert cell.models[1].ratio.value == 1


def test_noise_has_the_starts_in_which_two_copies_of_the_baseline_differ() -> None:
    rounds = [Round(start, (block(100), block(100), block(100 if start else 150))) for start in range(4) for _ in "123"]
    cell = estimate_cell(rounds, 0, 1)
    assert cell.num_disturbed == 0 and cell.noise > 0.1


def test_too_many_disturbed_rounds_are_unmeasurable() -> None:
    good = [Round(start, (block(100), block(300), block(100))) for start in range(2)]
    bad = [Round(start, (block(100, 0.5), block(300), block(100))) for start in range(2, 9)]
    cell = estimate_cell(good + bad, 0, 1)
    assert [own.verdict for own in cell.models] == ["baseline", "unmeasurable"]
    assert math.isinf(cell.noise) and not is_precise(cell, 0.5)
    assert [own.slowest_block_ms for own in cell.models] == [block(100).median_ns / 1e6, block(300).median_ns / 1e6]
    assert cell.models[1].ratio.value == pytest.approx(3)
    assert estimate_cell([*good, bad[0], Round(9, good[0].blocks)], 0, 1).models[1].verdict == "slower"


def test_two_starts_are_no_interval() -> None:
    rounds = [Round(start, (block(100), block(100), block(100))) for start in range(2)]
    cell = estimate_cell(rounds, 0, 1)
    assert (cell.models[1].verdict, cell.models[1].ratio.high) == ("unmeasurable", math.inf)


def test_without_the_systems_word_one_thread_waited_when_it_did_not_compute() -> None:
    waiting = Block([100] * 4, 200, None)
    assert (waiting.waited_fraction(1), waiting.waited_fraction(2)) == (0.5, 0.0)
    assert Block([100] * 4, 800, 400).waited_fraction(2) == 0.5


def test_precision_is_the_half_width_of_every_ratio() -> None:
    (wide,) = sessions((1.0, 1.0), 1, process_sd=0.05)
    (narrow,) = sessions((1.0, 1.0), 1, process_sd=0.001, round_sd=0.001, slow_moments=0)
    assert is_precise(narrow, 0.01) and not is_precise(wide, 0.01) and is_precise(wide, 0.2)


@pytest.mark.parametrize(("percent", "num_calls"), [(50, 5), (90, 29), (10, 29), (99, 299)])
def test_percentiles_need_enough_calls(percent: int, num_calls: int) -> None:
    assert calls_needed(percent) == num_calls
    assert 1 - (max(percent, 100 - percent) / 100) ** num_calls >= 0.95
    rounds = [Round(start, (block(100, num_calls=num_calls // 3),) * 2) for start in range(3)]
    assert percent not in estimate_cell(rounds, 0, 1).models[0].percentiles_ms  # 28, 297
    rounds.append(Round(3, (block(100, num_calls=2),) * 2))
    if percent != 50:
        assert percent in estimate_cell(rounds, 0, 1).models[0].percentiles_ms
