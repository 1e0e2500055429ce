"""Measure the latency of single predictions; `compare` decides what is measured, and in which order."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptpipe_eval.comparison import Latency, Threads
from ptpipe_eval.predict import EvalSplit

if TYPE_CHECKING:
    from ptpipe_torch import Predictor

Inputs: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""One batch, as a `Predictor` takes it."""

METHOD = (
    "time.perf_counter_ns around one prediction on real samples prepared beforehand, garbage collection off, after a "
    "warm-up, one model after another; median, 10th and 90th percentile of the runs"
)

_MAX_INPUTS = 8
"""Distinct inputs that a cell cycles through, so that no single sample decides."""
_MAX_INPUT_BYTES = 64 * 2**20
_MIN_RUNS = 5
_MIN_STEADY_RUNS = 50
_STEADY_FRACTION = 0.01
"""Half the width of the median's 95 % confidence interval over the median; measuring stops below it."""
_WARM_UP_WINDOW = 3
_WARM_UP_GAIN = 0.95
_MIN_WARM_UP_NS = 20_000_000


def spread_inputs(split: EvalSplit, batch_size: int) -> list[Inputs]:
    """Return batches of samples spread evenly over the split; samples repeat if there are few."""
    num_samples = len(split.samples)
    sample = next(iter(split.data.batches(split.name, order_N=np.zeros(1, dtype=np.int64)))).input_arrays()
    batch_bytes = batch_size * max(1, sum(array.nbytes for array in sample.values()))
    num_inputs = max(1, min(_MAX_INPUTS, num_samples // batch_size, _MAX_INPUT_BYTES // batch_bytes))
    num_wanted = batch_size * num_inputs
    order_N = np.arange(num_wanted, dtype=np.int64) * num_samples // num_wanted
    batches = split.data.batches(split.name, order_N=order_N, batch_size=batch_size)
    return [batch.input_arrays() for batch in batches]


@dataclass(frozen=True)
class Runs:
    """The measurements of one cell."""

    durations_ns: list[int]
    """Duration of each prediction, in order."""
    waited_ns: int | None
    """Time that all threads together were runnable without a processor; None if the system does not report it."""


def measure(predict: Predictor, inputs: Sequence[Inputs], budget_s: float) -> Runs:
    """Time predictions one by one until their median is steady or the budget is spent.

    `inputs` are cycled through. At least five predictions are timed, however long they take; the warm-up may take up
    to another `budget_s`.
    """
    budget_ns = int(budget_s * 1e9)
    warm_up(predict, inputs, budget_ns)
    durations_ns: list[int] = []
    spent_ns, next_check = 0, _MIN_STEADY_RUNS
    waited_before_ns = waiting_ns()
    with garbage_collection_off():
        for batch in cycle(inputs):
            duration_ns = _timed(predict, batch)
            durations_ns.append(duration_ns)
            spent_ns += duration_ns
            if spent_ns >= budget_ns and len(durations_ns) >= _MIN_RUNS:
                break
            if len(durations_ns) >= next_check and spent_ns >= budget_ns // 4:
                if _median_is_steady(durations_ns):
                    break
                next_check = 2 * len(durations_ns)  # sorting costs time and cache: check rarely
    waited_after_ns = waiting_ns()
    if waited_before_ns is None or waited_after_ns is None:
        return Runs(durations_ns, None)
    return Runs(durations_ns, max(0, waited_after_ns - waited_before_ns))  # a thread that ended takes its count with it


def warm_up(predict: Predictor, inputs: Sequence[Inputs], limit_ns: int) -> None:
    """Predict until runs stop getting faster: memory mapped, kernels selected, processor clock raised."""
    runs = cycle(inputs)
    spent_ns, before_ns = 0, float("inf")
    while spent_ns < limit_ns:
        window_ns = [_timed(predict, batch) for batch in islice(runs, _WARM_UP_WINDOW)]
        spent_ns += sum(window_ns)
        now_ns = statistics.median(window_ns)
        if now_ns > _WARM_UP_GAIN * before_ns and spent_ns >= min(_MIN_WARM_UP_NS, limit_ns):
            return
        before_ns = now_ns


def summarize(runs: Runs, batch_size: int, threads: Threads, num_threads: int) -> Latency:
    """Return median, 10th and 90th percentile of the runs, in milliseconds."""
    p10_ms, median_ms, p90_ms = (np.quantile(runs.durations_ns, (0.1, 0.5, 0.9)) / 1e6).round(6).tolist()
    waited_fraction = None
    if runs.waited_ns is not None:
        waited_fraction = round(min(1.0, runs.waited_ns / (num_threads * sum(runs.durations_ns))), 3)
    return Latency(batch_size, threads, num_threads, p10_ms, median_ms, p90_ms, len(runs.durations_ns), waited_fraction)


def waiting_ns() -> int | None:
    """Return how long this process's threads, together, have waited for a processor so far; None outside Linux."""
    tasks = Path("/proc/self/task")
    waited_ns = None
    for file in tasks.glob("*/schedstat"):
        try:
            # Time on a processor, time waiting for one, number of slices: Documentation/scheduler/sched-stats.rst.
            _, task_waited_ns, _ = file.read_text(encoding="ascii").split()
        except OSError:
            continue  # the thread has just ended
        waited_ns = (waited_ns or 0) + int(task_waited_ns)
    return waited_ns


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disable the garbage collector, whose pauses would count as latency."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _timed(predict: Predictor, inputs: Inputs) -> int:
    started_ns = time.perf_counter_ns()
    predict(inputs)
    return time.perf_counter_ns() - started_ns


def _median_is_steady(durations_ns: Sequence[int]) -> bool:
    # The interval between two order statistics that holds the median with 95 % confidence, by the normal
    # approximation of the binomial: Conover, Practical Nonparametric Statistics (3rd ed.), section 3.2.
    ordered_ns, count = sorted(durations_ns), len(durations_ns)
    reach = 0.98 * sqrt(count)
    low, high = int(count / 2 - reach), min(ceil(count / 2 + reach), count - 1)
    return ordered_ns[high] - ordered_ns[low] <= 2 * _STEADY_FRACTION * ordered_ns[count // 2]
