"""Compare a measured latency with the least that this machine could take: the roofline.

Computing takes at least the multiply-accumulates of each dtype over the peak rate of that dtype; reading at least the
bytes of weights, inputs and outputs over the bandwidth at which so many bytes can be read again and again, which is a
cache's where they fit it. The larger of the two is the limit: the model is on that side of the ridge.

Williams, Waterman and Patterson, Roofline: An Insightful Visual Performance Model (Communications of the ACM 52, 2009);
bandwidth by working set as in Ilic, Pratas and Sousa, Cache-aware Roofline Model (Computer Architecture Letters 13,
2014). Imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ptpipe_eval.latency.latencies import Latency, Limited

if TYPE_CHECKING:
    from ptpipe_eval.graph.facts import Costs, Peaks


@dataclass(frozen=True)
class Limit:
    """The least time of a prediction."""

    limit_ms: float
    limited_by: Limited


def find_limit(costs: Costs, peaks: Peaks, batch_size: int) -> Limit | None:
    """Return the least time that a batch takes; None where not all that it computes is known."""
    if costs.macs is None or costs.weights_read_bytes is None or costs.io_bytes is None:
        return None
    if not costs.macs_by_dtype.keys() <= peaks.macs_per_s.keys():  # a dtype whose peak was not measured
        return None
    compute_s = sum(number / peaks.macs_per_s[dtype] for dtype, number in costs.macs_by_dtype.items()) * batch_size
    num_bytes = costs.weights_read_bytes + batch_size * costs.io_bytes
    bandwidth = peaks.bandwidth(num_bytes)
    memory_s = num_bytes / bandwidth if bandwidth else 0.0
    if memory_s > compute_s:
        return Limit(1e3 * memory_s, "memory")
    return Limit(1e3 * compute_s, "compute") if compute_s > 0 else None


def with_limit(cell: Latency, costs: Costs | None, peaks: Peaks | None) -> Latency:
    """Return the latency with the limit of this machine beside it, where that is known.

    A limit that a latency is below of is none: something slowed the machine while its peaks were measured.
    """
    limit = find_limit(costs, peaks, cell.batch_size) if costs and peaks else None
    if limit is None or limit.limit_ms > cell.median_ms:
        return cell
    fraction = limit.limit_ms / cell.median_ms
    return replace(
        cell, limit_ms=_rounded(limit.limit_ms), limited_by=limit.limited_by, peak_fraction=_rounded(fraction)
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
