"""Scaling laws fitted to measured throughputs and all-reduce times, and what they predict. Only arithmetic.

Legend: p workers; n bytes of gradients; alpha seconds per message (latency); beta seconds per byte (1 / bandwidth).

A ring all-reduce of n bytes over p workers takes 2 (p - 1) alpha + 2 (p - 1) / p n beta: p - 1 messages of n / p bytes
to reduce, and as many to distribute the sums. Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005, section 4; Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREDICTED = tuple(2**power for power in range(9))
"""Numbers of workers to predict for: 1 to 256."""
ALL_REDUCE_PASSES = 2
"""Around the ring: reduce-scatter, all-gather. Sharded training (ZeRO, FSDP) needs three: parameters are gathered
before the forward and before the backward pass, and gradients reduced once: Rajbhandari et al. 2020, section 7."""
BACKWARD_FRACTION = 2 / 3
"""Of a step's computation, what an all-reduce can overlap with. The backward pass computes about twice as much as the
forward pass (Kaplan et al. 2020, section 2.1); gradients are sent once they are ready (Li et al. 2020, section 3.2)."""


@dataclass(frozen=True)
class Throughput:
    """The measured throughput of one number of workers in one parallelism mode."""

    mode: str
    workers: int
    samples_per_s: float
    """Of all workers together; the median of the rounds."""
    rounds: tuple[float, ...]
    samples_per_step: float
    """Of all workers together."""

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step."""
        return self.samples_per_step / self.samples_per_s


@dataclass(frozen=True)
class AllReduceTime:
    """The measured time of an all-reduce."""

    workers: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Amdahl:
    """Amdahl's law: a fraction of the work is serial, so that more workers do not shorten it (Amdahl 1967)."""

    serial_fraction: float

    def speedup(self, workers: int) -> float:
        """Times the throughput of one worker."""
        return 1 / (self.serial_fraction + (1 - self.serial_fraction) / workers)

    def efficiency(self, workers: int) -> float:
        """Speedup divided by the number of workers."""
        return self.speedup(workers) / workers

    @property
    def max_speedup(self) -> float:
        """The limit for infinitely many workers."""
        return 1 / self.serial_fraction if self.serial_fraction else math.inf


@dataclass(frozen=True)
class Link:
    """The connection between two workers."""

    alpha_s: float
    beta_s_per_byte: float

    @property
    def latency_us(self) -> float:
        """Microseconds per message."""
        return 1e6 * self.alpha_s

    @property
    def bandwidth_gbit_s(self) -> float:
        """Gigabits per second; infinite if the size made no difference."""
        return 8e-9 / self.beta_s_per_byte if self.beta_s_per_byte else math.inf

    def ring_s(self, size_bytes: float, workers: int, passes: int = ALL_REDUCE_PASSES) -> float:
        """Seconds that `passes` around the ring take; an all-reduce is two."""
        steps = passes * (workers - 1)
        return steps * self.alpha_s + steps / workers * size_bytes * self.beta_s_per_byte


@dataclass(frozen=True)
class LinkFit:
    """A link fitted to all-reduces of several sizes."""

    link: Link
    error: float
    """Root mean square of the relative errors."""
    num_times: int


@dataclass(frozen=True)
class Prediction:
    """The efficiency of one number of workers, under the assumptions that the report lists."""

    workers: int
    comm_s: float
    """Communication per step, without any overlap."""
    efficiency_low: float
    """Nothing overlaps: all of it adds to the step."""
    efficiency_high: float
    """It overlaps with the backward pass, as far as that is long enough."""


def fit_amdahl(samples_per_s: Mapping[int, float]) -> Amdahl | None:
    """Fit the serial fraction s of X(1) / X(p) = s + (1 - s) / p by least squares.

    `samples_per_s`: X, by number of workers p; 1 must be among them. Returns None if it is the only one, or if more
    workers were slower than one, which the law can't describe. A fraction below 0 (better than ideal) becomes 0.
    """
    single = samples_per_s[1]
    numerator = denominator = 0.0
    for workers, rate in samples_per_s.items():
        parallel = 1 - 1 / workers
        numerator += (single / rate - 1 / workers) * parallel
        denominator += parallel**2
    if not denominator or numerator > denominator:
        return None
    return Amdahl(max(0.0, numerator / denominator))


def fit_link(times: Sequence[AllReduceTime]) -> LinkFit | None:
    """Fit alpha and beta of a ring all-reduce by least squares of the relative errors, both at least 0.

    Returns None if the times can't tell the two apart: fewer than two sizes.
    """
    rows = []
    for time in times:
        steps = ALL_REDUCE_PASSES * (time.workers - 1)
        rows.append((steps / time.seconds, steps / time.workers * time.size_bytes / time.seconds))
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in _products(rows))
    determinant = aa * bb - ab * ab
    if len(rows) < 2 or determinant <= 1e-9 * aa * bb:
        return None
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0:
        alpha, beta = 0.0, b / bb
    elif beta < 0:
        alpha, beta = a / aa, 0.0
    squares = [(x * alpha + y * beta - 1) ** 2 for x, y in rows]
    return LinkFit(Link(alpha, beta), math.sqrt(sum(squares) / len(squares)), len(rows))


def _products(rows: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    """The pairs of factors of the three sums in the normal equations."""
    return [(x, x) for x, _ in rows], list(rows), [(y, y) for _, y in rows]


def predict(
    compute_s: float, size_bytes: float, link: Link, workers: Sequence[int] = PREDICTED, passes: int = ALL_REDUCE_PASSES
) -> list[Prediction]:
    """Predict weak scaling: each worker computes `compute_s` per step, then all reduce `size_bytes` of gradients.

    `workers`: the numbers to predict for. `passes`: around the ring, per step.
    """
    result = []
    for num in workers:
        comm_s = link.ring_s(size_bytes, num, passes)
        exposed_s = max(0.0, comm_s - BACKWARD_FRACTION * compute_s)
        result.append(Prediction(num, comm_s, compute_s / (compute_s + comm_s), compute_s / (compute_s + exposed_s)))
    return result
