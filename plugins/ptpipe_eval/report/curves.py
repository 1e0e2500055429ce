"""ROC and precision-recall curves of several models, one over the other. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ptpipe import JSON
from ptpipe.sections import Block, Mark, Plot, Point, Series, Text

CURVES = "curves"
"""The name of the table, see `quality.curves`."""
_MAX_LABELS = 3
_MAX_MODELS = 4
"""Of the ones in between, the curves would cover each other."""


class _Curve(NamedTuple):
    """What a table of curves has in two columns, and how it is shown."""

    title: str
    table: str
    area: str
    x_label: str
    y_label: str


_SHOWN = (
    _Curve("ROC curve", "roc", "roc_auc", "false positive rate", "recall"),
    _Curve("Precision-recall curve", "precision_recall", "average_precision", "recall", "precision"),
)


def curve_plots(models: Mapping[str, Mapping[str, JSON]], pair: tuple[str, str]) -> Iterator[Block]:
    """Yield the curves of up to three labels: of several, those whose average precision falls most.

    `models`: their tables by name, of which up to four are drawn. `pair`: baseline and judged model.
    """
    by_model = {name: {str(row.get("name")): row for row in _rows(tables)} for name, tables in models.items()}
    labels = [label for label in by_model[pair[0]] if all(label in of for of in by_model.values())]
    drops = {label: _area_of(by_model[pair[0]][label]) - _area_of(by_model[pair[1]][label]) for label in labels}
    shown = sorted(labels, key=lambda label: -drops[label])[:_MAX_LABELS]
    if len(shown) < len(labels):
        yield Text(f"Curves of {len(shown)} of {len(labels)} labels: those that lose most average precision.")
    names = list(dict.fromkeys([pair[0], *[name for name in models if name not in pair][: _MAX_MODELS - 2], pair[1]]))
    for label in shown:
        for curve in _SHOWN:
            yield _plot(curve, label, {name: by_model[name][label] for name in names})


def _plot(curve: _Curve, label: str, rows: Mapping[str, Mapping[str, Any]]) -> Plot:
    lines, dots = [], []
    for name, row in rows.items():
        points = tuple(Point(x, y) for x, y in row[curve.table])
        lines.append(Series(f"{name}: area {row[curve.area]:.4f}", points))
        at = row.get("operating_point") or {}
        x, y = (at.get(axis.replace(" ", "_")) for axis in (curve.x_label, curve.y_label))
        if x is not None and y is not None:
            dots.append(Point(x, y))
    marks = (Mark("by chance", "y", next(iter(rows.values()))["fraction"]),) if curve.y_label == "precision" else ()
    predictions = [Series("as predicted", tuple(dots), is_line=False)] if dots else []
    return Plot(f"{curve.title} of {label}", curve.x_label, curve.y_label, (*lines, *predictions), marks)


def _rows(tables: Mapping[str, JSON]) -> Sequence[Mapping[str, Any]]:
    rows = tables.get(CURVES)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _area_of(row: Mapping[str, Any]) -> float:
    area = float(row["average_precision"])
    return area if math.isfinite(area) else 0.0
