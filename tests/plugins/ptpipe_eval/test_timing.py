from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ptpipe_eval import timing
from ptpipe_eval.predict import select_split

INPUT = np.zeros((1, 1, 8, 8), np.float32)


class Clock:
    """Stands in for the clock, so that every run takes a given time."""

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
    durations_ns = timing.measure(lambda images: time.sleep(0.002), [INPUT], budget_s=0.1).durations_ns
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
    assert timing.measure(clock.predict, [INPUT], budget_s=0.2).durations_ns == [3_000_000_000] * 5
    assert clock.runs == 5 + 3  # one window of warm-up


def test_the_first_slow_runs_are_not_measured(monkeypatch) -> None:
    clock = Clock(monkeypatch, [90, 50, 30, 20, 15, 12, *[10] * 10_000])
    assert set(timing.measure(clock.predict, [INPUT], budget_s=1).durations_ns) == {10_000_000}


def test_a_steady_model_takes_a_quarter_of_the_budget(monkeypatch) -> None:
    clock = Clock(monkeypatch, forever(1.0, 1.001, 1.002))
    assert 250 <= len(timing.measure(clock.predict, [INPUT], budget_s=1).durations_ns) <= 400


def test_an_unsteady_one_takes_all_of_it(monkeypatch) -> None:
    clock = Clock(monkeypatch, np.random.default_rng(1).uniform(0.5, 2.5, 10_000).tolist())
    durations_ns = timing.measure(clock.predict, [INPUT], budget_s=1).durations_ns
    assert 1e9 <= sum(durations_ns) < 1.0026e9


def test_warm_up_ends_also_where_every_run_is_faster(monkeypatch) -> None:
    clock = Clock(monkeypatch, (100 * 0.8**i for i in range(1000)))
    timing.warm_up(clock.predict, [INPUT], limit_ns=400_000_000)
    assert clock.now_ns < 600_000_000


def test_summary_gives_the_quantiles_in_milliseconds() -> None:
    random = np.random.default_rng(5)
    durations_ns = random.integers(1_000_000, 9_000_000, 101).tolist()
    cell = timing.summarize(timing.Runs(durations_ns, sum(durations_ns)), 32, "all", 4)
    ordered = sorted(durations_ns)
    assert (cell.p10_ms, cell.median_ms, cell.p90_ms) == pytest.approx(tuple(ordered[i] / 1e6 for i in (10, 50, 90)))
    assert (cell.batch_size, cell.threads, cell.num_threads, cell.num_runs) == (32, "all", 4, 101)
    assert cell.waited_fraction == 0.25  # four threads, together as long as the clock ran
    assert timing.summarize(timing.Runs(durations_ns, None), 32, "all", 4).waited_fraction is None


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this system does not report how long threads wait"
)
def test_time_lost_to_other_programs_is_measured() -> None:
    """Two busy processes on one processor: each waits about half of the time."""

    def compute(images):
        end = time.thread_time_ns() + 2_000_000
        while time.thread_time_ns() < end:
            pass

    allowed = os.sched_getaffinity(0)
    only = {min(allowed)}
    os.sched_setaffinity(0, only)
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        contended = timing.summarize(timing.measure(compute, [INPUT], budget_s=0.4), 1, "one", 1)
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, allowed)
    assert contended.waited_fraction > 0.25


@pytest.mark.parametrize("batch_size", [1, 32, 150, 1000])
def test_inputs_are_whole_batches_of_real_samples_from_all_over_the_split(digits, batch_size) -> None:
    inputs = [batch["images"] for batch in timing.spread_inputs(select_split(digits, "test"), batch_size)]
    (all_NCHW,) = (batch.inputs["images"].numpy() for batch in digits.batches("test", batch_size=1000))
    assert {images.shape for images in inputs} == {(batch_size, 1, 8, 8)}
    assert len(inputs) == {1: 8, 32: 8, 150: 2, 1000: 1}[batch_size]
    assert all(images.flags.c_contiguous and images.dtype == np.float32 for images in inputs)
    position = {image.tobytes(): i for i, image in enumerate(all_NCHW)}
    taken = [position[image.tobytes()] for images in inputs for image in images]
    assert taken == sorted(taken)
    assert taken[0] == 0 and taken[-1] >= 400 - 400 // len(inputs) - 1


def test_large_images_give_few_inputs(digits, monkeypatch) -> None:
    monkeypatch.setattr(timing, "_MAX_INPUT_BYTES", 3 * 32 * 64 * 4)
    assert len(timing.spread_inputs(select_split(digits, "test"), 32)) == 3
    assert len(timing.spread_inputs(select_split(digits, "test"), 128)) == 1
