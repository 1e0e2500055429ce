"""Draw values or ranges of named things, one below the other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from markupsafe import Markup

from ptpipe.sections import Dot, DotPlot
from ptpipe_report.html.plot import NUM_COLORS, RIGHT_PX, WIDTH_PX, draw_legend
from ptpipe_report.html.scale import Scale, horizontal_scale
from ptpipe_report.html.svg import CHARACTER_PX, element, line, picture, shortened, shortened_names, text

_ROW_PX, _BOTTOM_PX = 20.0, 40.0
_MAX_ROWS = 60
_MAX_NAME_PX = 190.0


def draw_dot_plot(plot: DotPlot) -> Markup:
    """Return the SVG of the first 60 rows."""
    names = plot.names[:_MAX_ROWS]
    legend, legend_px = draw_legend([each.name for each in plot.series], [False] * len(plot.series))
    left = min(_MAX_NAME_PX, 18 + max((len(name) for name in names), default=0) * CHARACTER_PX)
    top, bottom = 6 + legend_px, 6 + legend_px + len(names) * _ROW_PX
    values = [value for each in plot.series for dot in each.dots[: len(names)] for value in _values(dot)]
    values += [mark.value for mark in plot.marks]
    x_scale = horizontal_scale(values, left, WIDTH_PX - RIGHT_PX)
    parts = [*_axis(plot, x_scale, top, bottom)]
    for row, (name, shown) in enumerate(zip(names, shortened_names(names, left - 12), strict=True)):
        y = top + (row + 0.5) * _ROW_PX
        parts.append(text(shown, left - 8, y + 4, "", "end", title=name))
        for number, each in enumerate(plot.series):
            shift = (number - (len(plot.series) - 1) / 2) * min(6, 14 / len(plot.series))
            parts += _dot(each.name, each.dots[row], x_scale, y + shift, f"s{number % NUM_COLORS}")
    return picture(WIDTH_PX, bottom + _BOTTOM_PX, describe(plot), legend, *parts)


def describe(plot: DotPlot) -> str:
    """Return what a plot shows, in words."""
    rows = [
        f"{name}: " + ", ".join(_dot_text(each.name, each.dots[row]) for each in plot.series)
        for row, name in enumerate(plot.names[:20])
    ]
    return f"{plot.title}, {plot.x_label}. {'; '.join(rows)}."


def _values(dot: Dot) -> Iterator[float]:
    yield from (value for value in (dot.value, dot.low, dot.high) if value is not None and math.isfinite(value))


def _axis(plot: DotPlot, x_scale: Scale, top: float, bottom: float) -> Iterator[Markup]:
    for tick in x_scale.ticks:
        x = x_scale(tick)
        yield line(x, top, x, bottom, "grid")
        yield text(x_scale.label(tick), x, bottom + 16, "tick", "middle")
    for mark in plot.marks:
        x = x_scale(mark.value)
        yield element("g", line(x, top, x, bottom, "mark"), element("title", mark.label))
    yield text(shortened(plot.x_label, 400), (x_scale.start_px + x_scale.end_px) / 2, bottom + 33, "", "middle")


def _dot(series: str, dot: Dot, x_scale: Scale, y: float, color: str) -> Iterator[Markup]:
    title = element("title", _dot_text(series, dot))
    if dot.low is not None and dot.high is not None:
        is_range = dot.value is None
        track = element("line", title, x1=x_scale(dot.low), y1=y, x2=x_scale(dot.high), y2=y,
                        class_=f"{'range' if is_range else 'bar'} {color}")  # fmt: skip
        yield track
    if dot.value is not None and math.isfinite(dot.value):
        yield element("circle", title, cx=x_scale(dot.value), cy=y, r=4, class_=f"dot {color}")


def _dot_text(series: str, dot: Dot) -> str:
    value = "" if dot.value is None else f" {dot.value:.4g}"
    interval = "" if dot.low is None or dot.high is None else f" [{dot.low:.4g}, {dot.high:.4g}]"
    return f"{series}{value}{interval}"
