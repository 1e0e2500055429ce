"""What stands beside the measured figures of a comparison: costs of its models, and limits of its latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ptpipe_eval.graph.costs import measure_costs, recount
from ptpipe_eval.graph.peaks import forget_peaks, machine_peaks
from ptpipe_eval.graph.roofline import find_limit, with_limit
from ptpipe_eval.latency.inputs import spread_inputs

if TYPE_CHECKING:
    from ptpipe_eval.comparison import Row
    from ptpipe_eval.graph.facts import Costs, Peaks
    from ptpipe_eval.predict import EvalSplit
    from ptpipe_torch import Deployable


def count_costs(models: Sequence[Deployable], split: EvalSplit) -> list[Costs]:
    """Return what each model computes of one sample, and what its files hold."""
    return [measure_costs(model, spread_inputs(split.of(model), 1)[0]) for model in models]


def with_limits(
    rows: Sequence[Row], models: Sequence[Deployable], split: EvalSplit
) -> tuple[list[Row], tuple[Peaks, ...]]:
    """Return the rows with the machine's limits beside their latencies, and its peaks."""
    peaks = {number: machine_peaks(number) for number in {cell.num_threads for row in rows for cell in row.latencies}}
    return [_limited(row, model, split, peaks) for row, model in zip(rows, models, strict=True)], tuple(
        peaks[number] for number in sorted(peaks)
    )


def _limited(row: Row, model: Deployable, split: EvalSplit, peaks: dict[int, Peaks]) -> Row:
    costs = {length: _costs_at(length, row, model, split) for length in {cell.length for cell in row.latencies}}
    cells = []
    for cell in row.latencies:
        own, limits = costs[cell.length], peaks[cell.num_threads]
        cells.append(with_limit(cell, own, limits))
        if cells[-1].limit_ms is None and own is not None and find_limit(own, limits, cell.batch_size):
            forget_peaks(cell.num_threads)  # it was faster: they were measured on a busy machine
    return replace(row, latencies=tuple(cells))


def _costs_at(length: int | None, row: Row, model: Deployable, split: EvalSplit) -> Costs | None:
    """Return the costs of a sample of that length; None where samples have lengths of their own."""
    have_own_sizes = any(spec.symbols for spec in split.data.info.signature.inputs)
    if row.costs is None or not have_own_sizes:
        return row.costs
    return None if length is None else recount(row.costs, model, spread_inputs(split.of(model), 1, length)[0])
