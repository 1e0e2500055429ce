"""How latency was measured: the ratios of every round beside what two copies of the baseline differ by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptpipe import Section
from ptpipe.sections import Block, Mark, Plot, Point, Series, Table, Topic

if TYPE_CHECKING:
    from ptpipe_eval.comparison import Row
    from ptpipe_eval.latency.latencies import Latency
    from ptpipe_eval.report import Compared

_MAX_CELLS = 4
_MAX_SERIES = 8
_FAR = 4
"""Times: ratios farther apart are shown on a logarithmic axis."""


def latency_section(compared: Compared) -> Section | None:
    """Return the ratios of every round for the first cells, and what a first prediction takes; None without any."""
    rows = [row for row in compared.comparison.rows if row.name != compared.comparison.baseline and row.latencies]
    if not rows:
        return None
    # The judged model first: it has the first color in every plot, and is there however many there are.
    rows.sort(key=lambda row: row.name != compared.candidate)
    blocks: list[Block] = [
        _rounds(compared, rows[:_MAX_SERIES], cell) for cell in rows[0].latencies[:_MAX_CELLS] if cell.round_ratios
    ]
    blocks += _start_up(compared)
    return Section("Latency by round", tuple(blocks), Topic.LATENCY, compared.stage_id) if blocks else None


def _rounds(compared: Compared, rows: list[Row], cell: Latency) -> Plot:
    series = []
    for row in rows:
        own = row.latency(cell.batch_size, cell.threads, cell.length)
        ratios = own.round_ratios if own else ()
        series.append(Series(row.name, tuple(Point(float(number), ratio) for number, ratio in enumerate(ratios, 1))))
    every = [point.y for each in series for point in each.points]
    is_log = min(every, default=1.0) > 0 and max(every, default=1.0) > _FAR * min(every, default=1.0)
    marks = [Mark(compared.comparison.baseline, "y", 1.0)]
    if cell.noise is not None:
        marks.append(Mark(f"noise: two copies differ by {100 * cell.noise:.1f} %", "y", 1 - cell.noise, 1 + cell.noise))
    starts = f"{cell.num_starts} start{'s' * (cell.num_starts != 1)}"
    title = f"{cell.label.capitalize()}: {starts}, {cell.num_disturbed} rounds repeated"
    label = f"ratio to {compared.comparison.baseline}"
    return Plot(title, "round", label, tuple(series), tuple(marks), is_log_y=is_log)


def _start_up(compared: Compared) -> list[Table]:
    rows = [
        (row.name, row.start_up.load_ms, row.start_up.first_call_ms, row.start_up.peak_memory_bytes)
        for row in compared.comparison.rows
        if row.start_up
    ]
    columns = ("model", "load_ms", "first_call_ms", "peak_memory_bytes")
    return [Table(columns, tuple(rows), "Until the first prediction, in a fresh process")] if rows else []
