from __future__ import annotations

import gc
import statistics
import time

import numpy as np
import pytest

from ptpipe_eval import timing
from ptpipe_eval.classification import open_sitting

INPUT = np.zeros((1, 1, 8, 8), np.float32)


class Clock:
    """Stands in for the clock, so that every run takes as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, durations_ms) -> None:
        self.now_ns, self.durations_ms, self.runs = 0, iter(durations_ms), 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now_ns)

    def predict(self, images_BCHW: np.ndarray) -> np.ndarray:
        self.now_ns += round(next(self.durations_ms) * 1e6)
        self.runs += 1
        return images_BCHW


def forever(*values):
    while True:
        yield from values


def test_a_real_wait_is_measured() -> None:
    durations_ns = timing.measure(lambda images: time.sleep(0.002), [INPUT], budget_s=0.1)
    assert 2e6 <= statistics.median(durations_ns) < 6e6
    assert 5 <= len(durations_ns) <= 50


def test_the_collector_is_off_while_the_clock_runs_and_put_back() -> None:
    seen = []
    timing.measure(lambda images: seen.append(gc.isenabled()), [INPUT], budget_s=0.001)
    assert gc.isenabled()
    assert seen[-5:] == [False] * 5

    gc.disable()
    try:
        timing.measure(lambda images: None, [INPUT], budget_s=0.001)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_put_back_after_an_error() -> None:
    calls = []

    def fail_in_the_end(images):
        calls.append(1)
        if len(calls) > 20_000:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError):
        timing.measure(fail_in_the_end, [INPUT], budget_s=60)
    assert gc.isenabled()


def test_slow_models_are_run_five_times(monkeypatch) -> None:
    clock = Clock(monkeypatch, forever(3000))
    assert timing.measure(clock.predict, [INPUT], budget_s=0.2) == [3_000_000_000] * 5
    assert clock.runs == 5 + 3  # one window of warm-up


def test_the_first_slow_runs_are_not_measured(monkeypatch) -> None:
    clock = Clock(monkeypatch, [90, 50, 30, 20, 15, 12, *[10] * 10_000])
    assert set(timing.measure(clock.predict, [INPUT], budget_s=1)) == {10_000_000}


def test_a_steady_model_takes_a_quarter_of_the_budget(monkeypatch) -> None:
    clock = Clock(monkeypatch, forever(1.0, 1.001, 1.002))
    assert 250 <= len(timing.measure(clock.predict, [INPUT], budget_s=1)) <= 400


def test_an_unsteady_one_takes_all_of_it(monkeypatch) -> None:
    clock = Clock(monkeypatch, np.random.default_rng(1).uniform(0.5, 2.5, 10_000).tolist())
    durations_ns = timing.measure(clock.predict, [INPUT], budget_s=1)
    assert 1e9 <= sum(durations_ns) < 1.0026e9


def test_warm_up_ends_also_where_every_run_is_faster(monkeypatch) -> None:
    clock = Clock(monkeypatch, (100 * 0.8**i for i in range(1000)))
    timing.warm_up(clock.predict, [INPUT], limit_ns=400_000_000)
    assert clock.now_ns < 600_000_000


def test_summary_gives_the_quantiles_in_milliseconds() -> None:
    random = np.random.default_rng(5)
    durations_ns = random.integers(1_000_000, 9_000_000, 101).tolist()
    cell = timing.summarize(durations_ns, 32, "all", 4)
    ordered = sorted(durations_ns)
    assert (cell.p10_ms, cell.median_ms, cell.p90_ms) == pytest.approx(tuple(ordered[i] / 1e6 for i in (10, 50, 90)))
    assert (cell.batch_size, cell.threads, cell.num_threads, cell.num_runs) == (32, "all", 4, 101)


@pytest.mark.parametrize("batch_size", [1, 32, 150, 1000])
def test_inputs_are_whole_batches_of_real_samples_from_all_over_the_split(digits, batch_size) -> None:
    inputs = timing.spread_inputs(open_sitting(digits, "test"), batch_size)
    (all_NCHW,) = (batch.images_NCHW.numpy() for batch in digits.batches("test", batch_size=1000))
    assert {images.shape for images in inputs} == {(batch_size, 1, 8, 8)}
    assert len(inputs) == {1: 8, 32: 8, 150: 2, 1000: 1}[batch_size]
    assert all(images.flags.c_contiguous and images.dtype == np.float32 for images in inputs)
    position = {image.tobytes(): i for i, image in enumerate(all_NCHW)}
    taken = [position[image.tobytes()] for images in inputs for image in images]
    assert taken == sorted(taken)
    assert taken[0] == 0 and taken[-1] >= 400 - 400 // len(inputs) - 1


def test_inputs_of_great_images_are_few(digits, monkeypatch) -> None:
    monkeypatch.setattr(timing, "_MAX_INPUT_BYTES", 3 * 32 * 64 * 4)
    assert len(timing.spread_inputs(open_sitting(digits, "test"), 32)) == 3
    assert len(timing.spread_inputs(open_sitting(digits, "test"), 128)) == 1
