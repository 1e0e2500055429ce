"""What was measured of a model's speed, as comparisons keep it. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

Threads: TypeAlias = Literal["one", "all"]
Limited: TypeAlias = Literal["compute", "memory"]
Speed: TypeAlias = Literal["baseline", "faster", "slower", "same within noise", "unmeasurable"]


def cell_label(batch_size: int, threads: Threads, length: int | None = None) -> str:
    """Return the name of a latency cell: `batch 32, all threads`, `batch 1, length 128, one thread`."""
    sizes = f"batch {batch_size}" if length is None else f"batch {batch_size}, length {length}"
    return f"{sizes}, {threads} thread{'' if threads == 'one' else 's'}"


@dataclass(frozen=True)
class Latency:
    """Wall time of one prediction at a batch size and number of threads, and its ratio to the baseline's.

    Bounds are those of 95 % confidence intervals, and None where too few starts were measured for one.
    """

    batch_size: int
    threads: Threads
    num_threads: int
    """The number of threads that `threads` meant on the measuring machine."""
    median_ms: float
    low_ms: float | None
    high_ms: float | None
    ratio: float
    """To the baseline's latency, measured in the same rounds."""
    ratio_low: float | None
    ratio_high: float | None
    speed: Speed
    """`faster` or `slower` than the baseline by more than `noise`, or else that it is not."""
    noise: float | None
    """How far from 1 the ratio of two processes with one and the same model may be; of the cell."""
    num_starts: int
    """How many times every model was started in a new process."""
    num_runs: int
    """How many predictions were timed."""
    cpu_ms: float
    """CPU time of one prediction, of all threads."""
    waited_fraction: float
    """Fraction of the time that its threads waited for a busy processor."""
    num_disturbed: int
    """How many rounds were repeated because other programs disturbed them; of the cell."""
    p10_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    """Percentiles of all predictions; None where too few were timed to tell: the 99th takes 299."""
    round_ratios: tuple[float, ...] = ()
    """`ratio` in every round, in order."""
    length: int | None = None
    """Of the sequences; None: that of the data set's own samples."""
    limit_ms: float | None = None
    """The least that this machine could take, by what the model computes and reads; None where it isn't known."""
    limited_by: Limited | None = None
    """Which of the two that is."""
    bound_ms: float | None = None
    """Of an unmeasurable median, what it is below all the same, since other programs only slow down; else None."""
    peak_fraction: float | None = None
    """`limit_ms` over `median_ms`: how much of what the machine can do is used."""

    @property
    def label(self) -> str:
        """`batch 32, all threads`."""
        return cell_label(self.batch_size, self.threads, self.length)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the latency whose fields these are."""
        return cls(**{**content, "round_ratios": tuple(content["round_ratios"])})


def is_slower(latency: Latency, other: Latency) -> bool:
    """Return whether a model is slower than another of its session, for certain and by more than noise.

    Both latencies have intervals of their ratio to the baseline's; where these overlap, nothing is claimed.
    """
    if latency.ratio_low is None or other.ratio_high is None or latency.noise is None:
        return False
    return latency.ratio_low > other.ratio_high and latency.ratio > other.ratio * (1 + latency.noise)


@dataclass(frozen=True)
class StartUp:
    """What a model takes before its first result, in a fresh process that has its libraries loaded."""

    load_ms: float
    """From the file to being ready to predict."""
    first_call_ms: float
    """The first prediction, at the smallest batch size."""
    peak_memory_bytes: int
    """What the process had at most, more than before it loaded the model."""


@dataclass(frozen=True)
class Measured:
    """One model of a session."""

    latencies: tuple[Latency, ...]
    start_up: StartUp
