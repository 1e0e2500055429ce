"""The tables that a run made: artifacts side by side, read from the summaries in the event, and metrics that are rows.

A comparison is any output of a type called `Comparison` whose summary has `rows`: a list of objects. A row's scalars
are columns, whatever they are called; a list of objects inside a row (latencies) becomes a column for each of its
members. So columns that a later version of the table adds are shown without a change here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ptpipe import JSON, StageFinished
from ptpipe_report.figures import NOTHING, figure, fixed_decimals

_HIDDEN = frozenset({"num_correct"})
"""Said by another column already."""
_MEDIAN = "median_ms"
_MOST_ROWS = 100
"""Of a metric; a longer one is for programs to read."""


@dataclass(frozen=True)
class Column:
    """One property of every artifact; None where a row lacks it."""

    name: str
    """What says the unit, as in `figures.figure`."""
    label: str
    values: tuple[JSON, ...]

    @property
    def is_text(self) -> bool:
        """Whether it is read as words and not as numbers."""
        return any(isinstance(value, str) for value in self.values)

    @property
    def unit(self) -> str:
        """What all of its numbers are in and the heading says; empty where each says it by itself."""
        return "ms" if self.name.endswith("_ms") else "points" if self.name == "drop" else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as they are read, without the column's unit; latencies with their points in line."""
        if self.unit == "ms":
            return fixed_decimals(self.values)
        texts = (NOTHING if value is None else figure(self.name, value).text for value in self.values)
        return tuple(text.removesuffix(f" {self.unit}") for text in texts)


@dataclass(frozen=True)
class Table:
    """Artifacts side by side."""

    stage_id: str
    columns: tuple[Column, ...]
    """The first one names the artifact."""
    baseline: str
    """Name of the row that the others are held against; may be empty."""
    facts: Mapping[str, JSON]
    """What holds for the whole table: data, split, number of samples, method ..."""

    @property
    def is_baseline(self) -> tuple[bool, ...]:
        """For each row, whether it is the baseline."""
        return tuple(value == self.baseline for value in self.columns[0].values)


def tables(stages: Sequence[StageFinished]) -> Iterator[Table]:
    """The comparison of every stage that made one."""
    for stage in stages:
        for output in stage.outputs.values():
            summary = output.get("summary")
            if type_name(output) == "Comparison" and isinstance(summary, Mapping):
                table = _table(stage.stage_id, summary)
                if table is not None:
                    yield table


def metric_tables(stages: Sequence[StageFinished]) -> Iterator[tuple[str, Table]]:
    """Every metric that is a list of objects (epochs, workers): its name, and a table with a row for each."""
    for stage in stages:
        for name, value in stage.metrics.items():
            if isinstance(value, list) and len(value) <= _MOST_ROWS and all(isinstance(row, Mapping) for row in value):
                table = _table(stage.stage_id, {"rows": value})
                if table is not None:
                    yield name, table


def type_name(output: Mapping[str, JSON]) -> str:
    """The class of an output, without the module that it may be written with."""
    return str(output.get("type", "")).replace(":", ".").rpartition(".")[2]


def _table(stage_id: str, summary: Mapping[str, JSON]) -> Table | None:
    listed = summary.get("rows")
    rows = [_cells(row) for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    headings = {heading: None for row in rows for heading in row}  # a dict: in the order of appearance
    if not headings:
        return None
    order = sorted(headings, key=lambda heading: heading[0] != "name")
    columns = tuple(Column(name, label, tuple(row.get((name, label)) for row in rows)) for name, label in order)
    facts = {name: value for name, value in summary.items() if isinstance(value, str | int | float)}
    return Table(stage_id, columns, str(facts.pop("baseline", "")), facts)


def _cells(row: Mapping[str, JSON]) -> dict[tuple[str, str], JSON]:
    """A row's values by (name, label) of their columns."""
    cells: dict[tuple[str, str], JSON] = {}
    for name, value in row.items():
        if isinstance(value, list):
            cells |= {("latency_ms", label): median for label, median in _latencies(value)}
        elif name not in _HIDDEN and not isinstance(value, dict):
            cells[name, name.removesuffix("_bytes").removesuffix("_ms").replace("_", " ")] = value
    return cells


def _latencies(cells: Sequence[JSON]) -> Iterator[tuple[str, JSON]]:
    for cell in cells:
        if isinstance(cell, Mapping) and _MEDIAN in cell:
            threads = {"one": "1 thread", "all": "all threads"}.get(str(cell.get("threads")), "")
            batch = f"batch {cell['batch_size']}" if "batch_size" in cell else ""
            yield ", ".join(part for part in (batch, threads) if part) or "latency", cell[_MEDIAN]
