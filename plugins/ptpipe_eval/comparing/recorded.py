"""What past runs measured of their models, side by side. Nothing is measured again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ptpipe.commands import Cell, Row, comparisons, describe_end, options, verdicts, written_options

ALWAYS = ("run", "model")
PastRun: TypeAlias = tuple[Mapping[str, Any], Path]
"""Record and folder."""
_METRIC_FAMILIES = ("train", "eval")


def recorded_rows(runs: Sequence[PastRun]) -> list[Row]:
    """Return a row for each run and model: metrics, size, latency, verdicts, and options that differ between the runs.

    A narrow terminal shows the first columns.
    """
    differing = _differing_options(runs)
    return [row for record, _ in runs for row in _rows(record, differing)]


def session_note(rows: Sequence[Row]) -> list[str]:
    """Return a warning where latencies were measured in different sessions."""
    sessions = {row["session"].text for row in rows if "session" in row}
    if len(sessions) < 2 or not any(name.startswith("ms ") for row in rows for name in row):
        return []
    return [
        f"latencies are of {len(sessions)} sessions: compare them within one session only; "
        "`ptpipe compare RUN RUN --data MANIFEST` measures all models in one"
    ]


def _rows(record: Mapping[str, Any], differing: Sequence[str]) -> Iterator[Row]:
    values = options(record)
    first = {"run": Cell.of(record["run_id"]), "model": Cell.of("")}
    own = {
        **{name: Cell.of(values.get(name)) for name in differing},
        "manifest": Cell.of(record["name"]),
        "ended": Cell.of(describe_end(record)),
    }
    found = False
    for stage, summary in comparisons(record):
        for row in summary["rows"]:
            found = True
            verdicts_on = _verdict_cells(record, str(row.get("name")))
            yield {**first, **_result_cells(row), **verdicts_on, **own, **_origin_cells(stage, summary, row)}
    if not found:
        yield {**first, **_metric_cells(record), **_verdict_cells(record, None), **own}


def _result_cells(row: Mapping[str, Any]) -> dict[str, Cell]:
    metrics, latencies = row.get("metrics"), row.get("latency")
    cells = {"model": Cell.of(row.get("name"))}
    cells |= {name: Cell.of(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}
    for name, key in (("size (bytes)", "size_bytes"), ("compressed (bytes)", "compressed_bytes")):
        cells |= _count_cell(name, row.get(key))
    for cell in latencies if isinstance(latencies, list) else ():
        cells |= _latency_cell(cell) if isinstance(cell, dict) else {}
    return cells


def _origin_cells(stage: Mapping[str, Any], summary: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Cell]:
    cells = {
        "format": Cell.of(row.get("format")),
        "data": Cell.of(f"{summary.get('data')} {summary.get('split')} {summary.get('num_samples')}"),
        **_count_cell("MACs", row.get("macs")),
    }
    if row.get("latency"):
        cells["session"] = Cell.of(summary.get("measured_at"))
        cells["machine"] = Cell.of(stage.get("machine"))
    return cells


def _count_cell(name: str, number: object) -> dict[str, Cell]:
    return {name: Cell(number, f"{number:,}")} if isinstance(number, int) else {}


def _latency_cell(cell: Mapping[str, Any]) -> dict[str, Cell]:
    threads = {"one": "1 thread", "all": "all threads"}.get(str(cell.get("threads")), "")
    length = f", length {cell['length']}" if cell.get("length") else ""
    median_ms = cell.get("median_ms")
    text = f"{median_ms:.4g}" if isinstance(median_ms, int | float) else ""
    return {f"ms (batch {cell.get('batch_size')}{length}, {threads})": Cell(median_ms, text)}


def _verdict_cells(record: Mapping[str, Any], model: str | None) -> dict[str, Cell]:
    """Return the verdicts on a model; those that name no model belong to every row."""
    found = {stage_id: _decision_on(model, verdict) for stage_id, verdict in verdicts(record).items()}
    return {f"{stage_id} verdict": Cell.of(decision) for stage_id, decision in found.items() if decision is not None}


def _decision_on(model: str | None, verdict: Mapping[str, Any]) -> str | None:
    """Return what a gate decided of a model, None where it did not judge it. `model`: None for the whole verdict."""
    several = verdict.get("candidates")
    if model is not None and isinstance(several, list):
        return next((row["decision"] for row in several if row.get("candidate") == model), None)
    decision: str = verdict["decision"]
    return decision if model is None or verdict.get("candidate") in (None, model) else None


def _metric_cells(record: Mapping[str, Any]) -> dict[str, Cell]:
    """Return the numbers that training and evaluation reported, of a run that compared nothing."""
    return {
        f"{stage['stage_id']}.{name}": Cell.of(value)
        for stage in record["stages"]
        if stage["kind"].partition(".")[0] in _METRIC_FAMILIES
        for name, value in stage["metrics"].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _differing_options(runs: Sequence[PastRun]) -> list[str]:
    """Return the options that a manifest or an override writes, and that differ between runs that have them."""
    written = {name for record, folder in runs for name in written_options(folder, record)}
    values: dict[str, set[str]] = {}
    for record, _ in runs:
        for name, value in options(record).items():
            values.setdefault(name, set()).add(Cell.of(value).text)
    return [name for name, texts in values.items() if name in written and len(texts) > 1]
