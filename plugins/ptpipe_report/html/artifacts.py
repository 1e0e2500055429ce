"""The models of a comparison as a report shows them: a table with intervals, and plots of what trades off against what.

Read from the summary of an output of a type called `Comparison`, whose shape a plugin's own type may have too: what is
missing there is not shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptpipe import JSON, StageFinished
from ptpipe_report.comparison import latency_label, type_name
from ptpipe_report.formatting import NOTHING, bytes_text, figure, number

_MAX_DECIMALS = 6
_ROUNDING = 1e-6
"""The part of a metric by which two runtimes differ that compute the same in float32."""
MINUS = "\N{MINUS SIGN}"
_VERDICTS = {"faster": "faster", "slower": "slower", "same within noise": "same within noise",
             "unmeasurable": "not measurable here"}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A figure with its interval."""

    text: str
    interval: str = ""
    tone: str = ""
    """`good`, `bad`, `unsure` or nothing."""
    verdict: str = ""
    """Of a latency: `faster`, `slower`, `same within noise`, `not measurable here`."""
    ratio: str = ""
    """Of a latency, to the baseline's, with its interval."""
    label: str = ""
    """Of a latency: batch size, length and threads."""


@dataclass(frozen=True)
class Artifact:
    """A row of the table."""

    name: str
    is_baseline: bool
    format: str
    size: str
    size_ratio: str
    base_size: str
    metric: str
    drop: Cell | None
    flips: str
    latencies: Sequence[Cell]
    facts: Mapping[str, Any]
    """The row of the summary."""


@dataclass(frozen=True)
class Artifacts:
    """A comparison."""

    stage_id: str
    baseline: str
    data: str
    num_samples: int | None
    metric: Mapping[str, Any]
    """The primary one: `name`, `is_fraction`, `higher_is_better`; empty where none was measured."""
    rows: Sequence[Artifact]
    latency_labels: Sequence[str]
    method: str

    @property
    def metric_label(self) -> str:
        """`mean iou`."""
        return str(self.metric.get("name", "")).replace("_", " ")

    @property
    def drop_label(self) -> str:
        """What a drop is called."""
        return "points lost" if self.metric.get("is_fraction") else "worse by"

    @property
    def drop_name(self) -> str:
        """What a drop is called in the summary."""
        return "drop" if self.metric.get("is_fraction") else "worse_by"

    @property
    def has_flips(self) -> bool:
        """Whether predictions were compared."""
        return any(row.flips != NOTHING for row in self.rows)

    def row(self, name: str) -> Artifact | None:
        """Return the model of that name."""
        return next((row for row in self.rows if row.name == name), None)


def comparisons_of(stages: Sequence[StageFinished]) -> list[Artifacts]:
    """Return every comparison of a run that has rows with names and sizes."""
    found = []
    for stage in stages:
        for output in stage.outputs.values():
            summary = output.get("summary")
            if type_name(output) == "Comparison" and isinstance(summary, Mapping):
                found += [artifacts] if (artifacts := _artifacts(stage.stage_id, summary)) else []
    return found


def _artifacts(stage_id: str, summary: Mapping[str, Any]) -> Artifacts | None:
    rows = [row for row in summary.get("rows") or () if isinstance(row, Mapping) and {"name", "size_bytes"} <= {*row}]
    if not rows:
        return None
    metrics = [of for of in summary.get("metrics") or () if isinstance(of, Mapping) and "name" in of]
    metric: Mapping[str, Any] = metrics[0] if metrics else {}
    baseline = str(summary.get("baseline", ""))
    base_bytes = next((row["size_bytes"] for row in rows if row["name"] == baseline), None)
    labels = list(dict.fromkeys(label for row in rows for label in _latency_cells(row)))
    data = " · ".join(str(summary[name]) for name in ("data", "split") if summary.get(name))
    return Artifacts(
        stage_id,
        baseline,
        data,
        summary.get("num_samples"),
        metric,
        [_artifact(row, metric, baseline, base_bytes, labels) for row in rows],
        labels,
        str(summary.get("method", "")),
    )


def _artifact(
    row: Mapping[str, Any], metric: Mapping[str, Any], baseline: str, base_bytes: int | None, labels: Sequence[str]
) -> Artifact:
    is_baseline, name = row["name"] == baseline, metric.get("name", "")
    value, size = row.get(name), row["size_bytes"]
    cells = _latency_cells(row)
    return Artifact(
        name=str(row["name"]),
        is_baseline=is_baseline,
        format=str(row.get("format", "")),
        size=bytes_text(size),
        size_ratio=f"{number(size / base_bytes)}\N{MULTIPLICATION SIGN}" if base_bytes else NOTHING,
        base_size=bytes_text(base_bytes) if base_bytes else NOTHING,
        metric=figure(str(name), value).text if isinstance(value, int | float) else NOTHING,
        drop=None if is_baseline else _drop(row, metric),
        flips=f"{row['num_flips']:,}" if isinstance(row.get("num_flips"), int) and not is_baseline else NOTHING,
        latencies=[_latency(cells.get(label, {}), label, is_baseline) for label in labels],
        facts=row,
    )


def _drop(row: Mapping[str, Any], metric: Mapping[str, Any]) -> Cell | None:
    """Return the drop; green or red only where the interval excludes 0, and the drop is more than float rounding."""
    name = "drop" if metric.get("is_fraction") else "worse_by"
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if not isinstance(value, int | float):
        return None
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return Cell(drop_text(value, metric))
    level = row.get(str(metric.get("name")))
    is_rounding = isinstance(level, int | float) and abs(value) <= _ROUNDING * abs(level)
    tone = "" if is_rounding else "bad" if low > 0 else "good" if high < 0 else ""
    texts = [drop_text(of, metric, high - low) for of in (value, low, high)]
    return Cell(texts[0], f"[{texts[1]}, {texts[2]}]", tone)


def drop_text(value: float, metric: Mapping[str, Any], width: float = 0.0) -> str:
    """Return a drop in points, or in the metric's own unit with the digits that an interval of this width leaves."""
    if metric.get("is_fraction"):
        text = f"{round(100 * value, 2) + 0.0:.2f}"
    elif width > 0:
        decimals = max(0, 1 - math.floor(math.log10(width)))
        text = f"{round(value, decimals) + 0.0:,.{decimals}f}" if decimals <= _MAX_DECIMALS else f"{value:.3g}"
    else:
        text = number(value)
    return text.replace("-", MINUS)


def _latency_cells(row: Mapping[str, Any]) -> dict[str, Mapping[str, JSON]]:
    """Return the latencies of a row, by label."""
    cells = (cell for cell in row.get("latency") or () if isinstance(cell, Mapping) and "median_ms" in cell)
    return {latency_label(cell): cell for cell in cells}


def _latency(cell: Mapping[str, JSON], label: str, is_baseline: bool) -> Cell:
    median_ms = cell.get("median_ms")
    if not isinstance(median_ms, int | float):
        return Cell(NOTHING, label=label)
    verdict = "" if is_baseline else _VERDICTS.get(str(cell.get("speed")), "")
    tone = {"faster": "good", "slower": "bad", "not measurable here": "unsure"}.get(verdict, "")
    ratio = "" if is_baseline else _ratio_text(cell)
    return Cell(f"{number(float(median_ms))} ms", tone=tone, verdict=verdict, ratio=ratio, label=label)


def _ratio_text(cell: Mapping[str, JSON]) -> str:
    """Return the ratio to the baseline's latency, with its interval."""
    ratio, low, high = (cell.get(name) for name in ("ratio", "ratio_low", "ratio_high"))
    if not isinstance(ratio, int | float):
        return ""
    text = f"{ratio:.2f}\N{MULTIPLICATION SIGN}"
    return f"{text} [{low:.2f}, {high:.2f}]" if isinstance(low, float) and isinstance(high, float) else text
