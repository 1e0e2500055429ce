"""Plots of quality against size and latency, with intervals and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ptpipe.sections import Mark, Plot, Point, Series
from ptpipe_report.html.artifacts import Artifact, Artifacts
from ptpipe_report.run_summary import Gate

Values = Callable[[Mapping[str, Any]], "tuple[float, float | None, float | None] | None"]


def trade_off_plots(artifacts: Artifacts, candidates: Sequence[str], gates: Sequence[Gate]) -> list[Plot]:
    """Return quality over size and, for the first cell that was measured, over latency; none for a single model."""
    if not artifacts.metric or len(artifacts.rows) < 2:
        return []
    marks = _allowed(artifacts, gates)
    plots = [_plot(artifacts, candidates, marks, "Quality and size", "size, MB", _size)]
    if artifacts.latency_labels and any(_latency(row.facts) for row in artifacts.rows):
        label = f"latency, ms ({artifacts.latency_labels[0]})"
        plots.append(_plot(artifacts, candidates, marks, "Quality and latency", label, _latency))
    return [plot for plot in plots if plot is not None]


def _plot(
    artifacts: Artifacts, candidates: Sequence[str], marks: tuple[Mark, ...], title: str, x_label: str, values: Values
) -> Plot | None:
    points = [(row, point) for row in artifacts.rows if (point := _point(artifacts, row, values)) is not None]
    if len(points) < 2:
        return None
    groups: dict[str, list[Point]] = {"judged by a gate": [], "baseline": [], "other models": []}
    for row, point in points:
        is_judged = row.name in candidates
        groups["baseline" if row.is_baseline else "judged by a gate" if is_judged else "other models"].append(point)
    groups["Pareto front"] = _front([point for _, point in points])
    series = tuple(Series(name, tuple(of), is_line=name == "Pareto front") for name, of in groups.items() if of)
    unit = "points" if artifacts.metric.get("is_fraction") else "better is up"
    x_values = [point.x for _, point in points]
    is_log = min(x_values) > 0 and max(x_values) > 8 * min(x_values)
    return Plot(title, x_label, f"{artifacts.metric_label} vs {artifacts.baseline}, {unit}", series, marks, is_log)


def _point(artifacts: Artifacts, row: Artifact, values: Values) -> Point | None:
    x, name = values(row.facts), artifacts.drop_name
    drop, low, high = (row.facts.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if x is None or not isinstance(drop, int | float):
        return None
    factor = -100.0 if artifacts.metric.get("is_fraction") else -1.0  # up is better
    if row.is_baseline or not isinstance(low, int | float) or not isinstance(high, int | float):
        return Point(x[0], factor * drop + 0.0, x_low=x[1], x_high=x[2], label=row.name)
    return Point(x[0], factor * drop + 0.0, factor * high, factor * low, x[1], x[2], row.name)


def _front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other is at least as good as in both, and better in one; without their intervals."""
    best = [
        Point(point.x, point.y)
        for point in points
        if not any(
            other.x <= point.x and other.y >= point.y and (other.x, other.y) != (point.x, point.y) for other in points
        )
    ]
    return sorted(best, key=lambda point: point.x)


def _size(row: Mapping[str, Any]) -> tuple[float, None, None]:
    return row["size_bytes"] / 1e6, None, None


def _latency(row: Mapping[str, Any]) -> tuple[float, float | None, float | None] | None:
    cell = next((of for of in row.get("latency") or () if isinstance(of, Mapping) and "median_ms" in of), None)
    return None if cell is None else (cell["median_ms"], cell.get("low_ms"), cell.get("high_ms"))


def _allowed(artifacts: Artifacts, gates: Sequence[Gate]) -> tuple[Mark, ...]:
    """Return the margins that gates allow in the metric that is plotted."""
    metric, factor = artifacts.metric["name"], -100.0 if artifacts.metric.get("is_fraction") else -1.0
    limits: dict[float, str] = {}
    for gate in gates:
        limit = gate.facts.get("max_drop")
        if isinstance(limit, int | float) and metric in (gate.facts.get("metric"), *gate.facts):
            limits[limit] = gate.stage_id
    return tuple(Mark(f"allowed by {name}", "y", factor * limit) for limit, name in limits.items())
