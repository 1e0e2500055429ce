"""How a training scales: what measured figures fit, and what they predict. Numbers only; nothing is run here.

Legend: p workers; n bytes of gradients; alpha seconds a message (latency); beta seconds a byte (1 / bandwidth).

A ring all-reduce of n bytes over p workers takes 2 (p - 1) alpha + 2 (p - 1) / p n beta: p - 1 messages of n / p bytes
to sum, and as many to spread the sums. Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005, section 4; Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREDICTED = tuple(2**power for power in range(9))
"""Numbers of workers that are predicted: 1 to 256."""
ALL_REDUCE_PASSES = 2
"""Round the ring: sum, spread. Sharded training (ZeRO, FSDP) goes round three times, as parameters are gathered before
the forward and before the backward pass, and gradients summed once: Rajbhandari et al. 2020, section 7."""
BACKWARD_SHARE = 2 / 3
"""Of a step's computing, what an all-reduce can hide behind. The backward pass computes about twice what the forward
pass does (Kaplan et al. 2020, section 2.1), and sends gradients as they get ready (Li et al. 2020, section 3.2)."""


@dataclass(frozen=True)
class Throughput:
    """What one number of workers achieved in one mode."""

    mode: str
    workers: int
    images_per_s: float
    """Of all workers together; the median of the rounds."""
    rounds: tuple[float, ...]
    images_per_step: float
    """Of all workers together."""

    @property
    def step_s(self) -> float:
        """Seconds an optimizer step."""
        return self.images_per_step / self.images_per_s


@dataclass(frozen=True)
class AllReduceTime:
    """How long an all-reduce took."""

    workers: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Amdahl:
    """Amdahl's law: a share of the work that more workers make no shorter (Amdahl 1967)."""

    serial_share: float

    def speedup(self, workers: int) -> float:
        """Times the throughput of one worker."""
        return 1 / (self.serial_share + (1 - self.serial_share) / workers)

    def efficiency(self, workers: int) -> float:
        """Share of the throughput that so many workers would have if none waited."""
        return self.speedup(workers) / workers

    @property
    def greatest_speedup(self) -> float:
        """With workers without end."""
        return 1 / self.serial_share if self.serial_share else math.inf


@dataclass(frozen=True)
class Link:
    """What carries messages between two workers."""

    alpha_s: float
    beta_s_per_byte: float

    @property
    def latency_us(self) -> float:
        """Of a message."""
        return 1e6 * self.alpha_s

    @property
    def bandwidth_gbit_s(self) -> float:
        """Infinite where size made no difference."""
        return 8e-9 / self.beta_s_per_byte if self.beta_s_per_byte else math.inf

    def ring_s(self, size_bytes: float, workers: int, passes: int = ALL_REDUCE_PASSES) -> float:
        """Seconds that so many passes round the ring take; an all-reduce is two."""
        steps = passes * (workers - 1)
        return steps * self.alpha_s + steps / workers * size_bytes * self.beta_s_per_byte


@dataclass(frozen=True)
class LinkFit:
    """A link, as all-reduces of several sizes show it."""

    link: Link
    error: float
    """Root mean square of the relative errors."""
    num_times: int


@dataclass(frozen=True)
class Prediction:
    """What so many workers would achieve, if all that is assumed holds."""

    workers: int
    comm_s: float
    """Of a step, were nothing hidden behind computing."""
    efficiency_low: float
    """All of it adds to the step."""
    efficiency_high: float
    """It hides behind the backward pass, as far as that is long enough."""


def fit_amdahl(images_per_s: Mapping[int, float]) -> Amdahl | None:
    """Fit the serial share s of X(1) / X(p) = s + (1 - s) / p by least squares; X: images a second by workers.

    None where there is no figure but that of one worker, or where more workers were slower than one, which the law
    has no words for. A share below 0 (better than ideal) becomes 0.
    """
    alone = images_per_s[1]
    above = divisor = 0.0
    for workers, rate in images_per_s.items():
        parallel = 1 - 1 / workers
        above += (alone / rate - 1 / workers) * parallel
        divisor += parallel**2
    if not divisor or above > divisor:
        return None
    return Amdahl(max(0.0, above / divisor))


def fit_link(times: Sequence[AllReduceTime]) -> LinkFit | None:
    """Fit alpha and beta of a ring all-reduce by least squares of the relative errors, neither below 0.

    None where the times can't tell the two apart: fewer than two sizes.
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
    """Pairs of factors for the three entries of the normal equations."""
    return [(x, x) for x, _ in rows], list(rows), [(y, y) for _, y in rows]


def predict(
    compute_s: float, size_bytes: float, link: Link, workers: Sequence[int] = PREDICTED, passes: int = ALL_REDUCE_PASSES
) -> list[Prediction]:
    """Weak scaling: each worker computes `compute_s` a step, then all meet for `size_bytes` of gradients."""
    result = []
    for num in workers:
        comm_s = link.ring_s(size_bytes, num, passes)
        exposed_s = max(0.0, comm_s - BACKWARD_SHARE * compute_s)
        result.append(Prediction(num, comm_s, compute_s / (compute_s + comm_s), compute_s / (compute_s + exposed_s)))
    return result
