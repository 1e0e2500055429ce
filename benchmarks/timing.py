"""Times of alternatives, each measured in a process of its own, for benchmarks that take `--measure ROW`.

What one alternative changes in its process (glibc's malloc, caches of torch) would speed up the others.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

NUM_RUNS = 5


def median_s(run: Callable[[], object]) -> float:
    """Return the median seconds of some runs in this process, after one that warms up."""
    seconds = []
    for _ in range(NUM_RUNS + 1):
        begin_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[1:])


def race(script: str, rows: Sequence[str], num_rounds: int, options: Sequence[str]) -> dict[str, float]:
    """Start `script` with the options and `--measure ROW` for each row in turn; return medians of what it prints."""
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    for round_ in range(num_rounds):
        first = round_ % len(rows)
        for row in [*rows[first:], *rows[:first]]:
            command = [sys.executable, script, *options, "--measure", row]
            seconds[row].append(float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    return {row: statistics.median(values) for row, values in seconds.items()}
