"""Latencies as a session measures them."""

from __future__ import annotations

from typing import Any

from ptpipe_eval import Latency


def latency(batch_size: int, median_ms: float, ratio: float = 1.0, reach: float = 0.02, **fields: Any) -> Latency:
    """Return a latency at one thread whose intervals are this wide, relative, to each side."""
    values: dict[str, Any] = {
        "threads": "one",
        "num_threads": 1,
        "median_ms": median_ms,
        "low_ms": median_ms * (1 - reach),
        "high_ms": median_ms * (1 + reach),
        "ratio": ratio,
        "ratio_low": ratio * (1 - reach),
        "ratio_high": ratio * (1 + reach),
        "speed": "faster" if ratio < 1 else "baseline",
        "noise": 0.01,
        "num_starts": 5,
        "num_runs": 400,
        "cpu_ms": median_ms,
        "waited_fraction": 0.0,
        "num_disturbed": 0,
        "round_ratios": (ratio, ratio),
    }
    return Latency(batch_size, **values | fields)
