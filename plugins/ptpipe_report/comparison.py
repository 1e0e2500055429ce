"""The tables of a run: comparisons of models, read from the summaries of artifacts, and metrics that are lists of rows.

A comparison is any output of a type called `Comparison` whose summary has `rows`: a list of objects. A row's scalars
are columns, whatever their names; a list of objects inside a row (latencies) becomes a column per object. `x_low` and
`x_high` are the interval of `x` and stand beside it. Columns that a later version of the table adds are therefore shown
without a change here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ptpipe import JSON, StageFinished
from ptpipe_report.formatting import NOTHING, figure, fixed_decimals

_MEDIAN = "median_ms"
_MAX_ROWS = 100
"""Of a metric; a longer list is for programs."""


@dataclass(frozen=True)
class Column:
    """One property of every row; None where it is missing."""

    name: str
    """Implies the unit, as in `formatting.figure`."""
    label: str
    values: tuple[JSON, ...]
    marks: tuple[str, ...] = ()
    """Behind the values, of latencies how they compare with the baseline's: `0.83x`, `same`, `?`; or nothing."""

    @property
    def is_text(self) -> bool:
        """Whether its values are words, not numbers."""
        return any(isinstance(value, str) for value in self.values)

    @property
    def unit(self) -> str:
        """The unit to put below or after the label; empty if the label or each value contains it."""
        return "ms" if self.name.endswith("_ms") else "points" if self.name == "drop" else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The formatted values, without a unit that the heading shows; latencies with aligned points."""
        texts = fixed_decimals(self.values) if self.unit == "ms" else tuple(map(self._text, self.values))
        if not any(self.marks):
            return texts
        width = max(map(len, self.marks))
        return tuple(f"{text} {mark:<{width}}" for text, mark in zip(texts, self.marks, strict=True))

    def _text(self, value: JSON) -> str:
        if isinstance(value, list):  # a number and its interval
            text, low, high = map(self._text, value)
            return f"{text} [{low}, {high}]"
        text = NOTHING if value is None else figure(self.name, value).text
        return text if isinstance(value, str) else text.removesuffix(f" {self.unit}").removesuffix(f" {self.label}")


@dataclass(frozen=True)
class Table:
    """Models side by side, or the rows of a metric."""

    stage_id: str
    columns: tuple[Column, ...]
    """The first one names the row."""
    baseline: str
    """Name of the row that the others are compared with; may be empty."""
    facts: Mapping[str, JSON]
    """Properties of the whole table: data, split, number of samples, method ..."""

    @property
    def is_baseline(self) -> tuple[bool, ...]:
        """Whether each row is the baseline."""
        return tuple(value == self.baseline for value in self.columns[0].values)


def tables(stages: Sequence[StageFinished]) -> Iterator[Table]:
    """Yield the comparison of every stage that has one."""
    for stage in stages:
        for output in stage.outputs.values():
            summary = output.get("summary")
            if type_name(output) == "Comparison" and isinstance(summary, Mapping):
                table = _table(stage.stage_id, summary)
                if table is not None:
                    yield table


def metric_tables(stages: Sequence[StageFinished]) -> Iterator[tuple[str, Table]]:
    """Yield name and table of every metric that is a list of objects (epochs, workers), a row per object."""
    for stage in stages:
        for name, value in stage.metrics.items():
            if isinstance(value, list) and len(value) <= _MAX_ROWS and all(isinstance(row, Mapping) for row in value):
                table = _table(stage.stage_id, {"rows": value})
                if table is not None:
                    yield name, table


def explained_marks(columns: Sequence[Column]) -> str:
    """Explain the marks behind latencies that are there; empty if there are none."""
    marks = {mark for column in columns for mark in column.marks if mark}
    meanings = (
        ("0.5x: times the baseline's latency", any(mark.endswith("x") for mark in marks)),
        ("same: not faster or slower than noise is", "same" in marks),
        ("?: not measurable here and now", "?" in marks),
    )
    return "; ".join(text for text, is_used in meanings if is_used)


def type_name(output: Mapping[str, JSON]) -> str:
    """Return the class name of an output, without its module."""
    return str(output.get("type", "")).replace(":", ".").rpartition(".")[2]


def _table(stage_id: str, summary: Mapping[str, JSON]) -> Table | None:
    listed = summary.get("rows")
    rows = [_cells(row) for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    headings = {heading: None for row in rows for heading in row}  # a dict keeps the order of appearance
    if not headings:
        return None
    order = sorted(headings, key=lambda heading: heading[0] != "name")
    columns = tuple(_column(heading, [row.get(heading, (None, "")) for row in rows]) for heading in order)
    facts = {name: value for name, value in summary.items() if isinstance(value, str | int | float)}
    return Table(stage_id, columns, str(facts.pop("baseline", "")), facts)


def _column(heading: tuple[str, str], cells: Sequence[tuple[JSON, str]]) -> Column:
    return Column(*heading, values=tuple(value for value, _ in cells), marks=tuple(mark for _, mark in cells))


def _cells(row: Mapping[str, JSON]) -> dict[tuple[str, str], tuple[JSON, str]]:
    """Map (name, label) of each column to the row's value and its mark."""
    cells: dict[tuple[str, str], tuple[JSON, str]] = {}
    for name, value in row.items():
        if isinstance(value, list):
            cells |= {("latency_ms", label): cell for label, cell in _latencies(value)}
        elif not isinstance(value, dict) and not _is_bound(name, row):
            bounds = [row.get(f"{name}_low"), row.get(f"{name}_high")]
            cells[name, _label(name)] = (value if None in bounds else [value, *bounds], "")
    return cells


def _is_bound(name: str, row: Mapping[str, JSON]) -> bool:
    base, _, side = name.rpartition("_")
    return side in ("low", "high") and base in row


def _label(name: str) -> str:
    """Return `samples/s` for `samples_per_s`, `size` for `size_bytes`, `samples` for `num_samples`."""
    if name == "macs":
        return "MACs"
    if name.endswith("_per_s"):
        return name.removesuffix("_per_s").replace("_", " ") + "/s"
    return name.removeprefix("num_").removesuffix("_bytes").removesuffix("_ms").replace("_", " ")


def _latencies(cells: Sequence[JSON]) -> Iterator[tuple[str, tuple[JSON, str]]]:
    for cell in cells:
        if isinstance(cell, Mapping) and _MEDIAN in cell:
            yield latency_label(cell), (cell[_MEDIAN], _mark(cell))


def latency_label(cell: Mapping[str, JSON]) -> str:
    """Return `batch 1, length 64, all threads`: what tells a latency, or the facts of its gate, from others."""
    threads = {"one": "1 thread", "all": "all threads"}.get(str(cell.get("threads")), "")
    batch = f"batch {cell['batch_size']}" if "batch_size" in cell else ""
    length = f"length {cell['length']}" if cell.get("length") else ""
    return ", ".join(part for part in (batch, length, threads) if part) or "latency"


def _mark(cell: Mapping[str, JSON]) -> str:
    """Say how a latency compares with the baseline's, where that was measured."""
    speed, ratio = cell.get("speed"), cell.get("ratio")
    if speed in ("faster", "slower") and isinstance(ratio, int | float):
        return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"
    return {"same within noise": "same", "unmeasurable": "?"}.get(str(speed), "")
