"""Draw a plot of lines and points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from ptpipe.sections import Mark, Plot, Point, Series
from ptpipe_report.html.labels import Box, Placed, place_labels
from ptpipe_report.html.scale import Scale, horizontal_scale, scale
from ptpipe_report.html.svg import CHARACTER_PX, element, line, picture, shortened, text

WIDTH_PX, HEIGHT_PX = 480.0, 300.0
LEFT_PX, RIGHT_PX, BOTTOM_PX = 56.0, 12.0, 44.0
_Y_LABEL_PX, _TICK_GAP_PX = 18.0, 7.0
_LEGEND_PX = 20.0
_CAP_PX = 3.0
_MAX_POINTS = 400
_MAX_LABELS = 12
"""Of more points, those that a line goes through, and the only one of a series, alone have their names beside them."""
NUM_COLORS = 8


def draw_plot(plot: Plot) -> Markup:
    """Return the SVG of a plot."""
    series = [_thinned(each) for each in plot.series]
    legend, legend_px = draw_legend([each.name for each in series], [each.is_line for each in series])
    top_px = 8 + legend_px
    points = [point for each in series for point in each.points]
    y_scale = scale(_reached(plot, "y", points), HEIGHT_PX - BOTTOM_PX, top_px, is_log=plot.is_log_y)
    area = Box(_left_of(y_scale), top_px, WIDTH_PX - RIGHT_PX, HEIGHT_PX - BOTTOM_PX)
    x_scale = horizontal_scale(_reached(plot, "x", points), area.left, area.right, num_ticks=6, is_log=plot.is_log_x)
    parts = [
        *_axes(plot, x_scale, y_scale, area),
        *(_mark(mark, x_scale, y_scale, area) for mark in plot.marks),
        *(_draw(number, each, x_scale, y_scale) for number, each in enumerate(series)),
        *_labels(plot, _labelled(series), x_scale, y_scale, area),
    ]
    return picture(WIDTH_PX, HEIGHT_PX, describe(plot), legend, *parts)


def describe(plot: Plot) -> str:
    """Return what a plot shows, in words."""
    parts = [f"{plot.title}: {plot.y_label} over {plot.x_label}."]
    for each in plot.series:
        if not each.points:
            continue
        first, last = each.points[0], each.points[-1]
        if each.is_line and len(each.points) > 1:
            parts.append(f"{each.name}: from {first.y:.3g} at {first.x:.4g} to {last.y:.3g} at {last.x:.4g}.")
        else:
            shown = "; ".join(_point_text(point) for point in each.points[:12])
            parts.append(f"{each.name}: {shown}.")
    return " ".join([*parts, *(f"{mark.label} at {mark.value:.4g}." for mark in plot.marks)])


def draw_legend(names: Sequence[str], are_lines: Sequence[bool]) -> tuple[Markup, float]:
    """Return the names of several series with their colors, and the height that they take; nothing for one."""
    if len(names) < 2:
        return Markup(""), 0.0
    parts, x, row = [], LEFT_PX, 0
    for number, (name, is_line) in enumerate(zip(names, are_lines, strict=True)):
        shown = shortened(name, 300)
        width = 27 + len(shown) * CHARACTER_PX
        if x > LEFT_PX and x + width > WIDTH_PX:
            x, row = LEFT_PX, row + 1
        y = 12 + row * _LEGEND_PX
        color = f"s{number % NUM_COLORS}"
        sample = (
            line(x, y - 4, x + 14, y - 4, f"line {color}")
            if is_line
            else element("circle", cx=x + 7, cy=y - 4, r=4, class_=f"dot {color}")
        )
        parts += [sample, text(shown, x + 19, y)]
        x += width
    return element("g", *parts), (row + 1) * _LEGEND_PX


def _thinned(series: Series) -> Series:
    points = [point for point in series.points if math.isfinite(point.x) and math.isfinite(point.y)]
    if len(points) > _MAX_POINTS:
        points = [points[round(n * (len(points) - 1) / (_MAX_POINTS - 1))] for n in range(_MAX_POINTS)]
    return Series(series.name, tuple(points), series.is_line)


def _reached(plot: Plot, axis: str, points: Sequence[Point]) -> list[float]:
    """Return the values that an axis must hold."""
    found: list[float | None] = []
    for point in points:
        found += [point.x, point.x_low, point.x_high] if axis == "x" else [point.y, point.y_low, point.y_high]
    for mark in plot.marks:
        found += [mark.value, mark.end] if mark.axis == axis else []
    return [value for value in found if value is not None]


def _left_of(y_scale: Scale) -> float:
    """Return where the plot begins: right of its axis' label, which is turned, and of the longest tick."""
    longest = max((len(y_scale.label(tick)) for tick in y_scale.ticks), default=0)
    return max(LEFT_PX, _Y_LABEL_PX + longest * CHARACTER_PX + _TICK_GAP_PX)


def _axes(plot: Plot, x_scale: Scale, y_scale: Scale, area: Box) -> Iterator[Markup]:
    for tick in y_scale.ticks:
        y = y_scale(tick)
        yield line(area.left, y, area.right, y, "grid")
        yield text(y_scale.label(tick), area.left - _TICK_GAP_PX, y + 4, "tick", "end")
    for tick in x_scale.ticks:
        x = x_scale(tick)
        yield line(x, area.bottom, x, area.bottom + 4, "axis")
        yield text(x_scale.label(tick), x, area.bottom + 17, "tick", "middle")
    yield line(area.left, area.bottom, area.right, area.bottom, "axis")
    yield text(shortened(plot.x_label, 400), (area.left + area.right) / 2, HEIGHT_PX - 8, "", "middle")
    label = shortened(plot.y_label, area.bottom - area.top)
    middle = (area.top + area.bottom) / 2
    yield element("text", label, x=12, y=middle, transform=f"rotate(-90 12 {middle:.1f})", text_anchor="middle")


def _mark(mark: Mark, x_scale: Scale, y_scale: Scale, area: Box) -> Markup:
    if mark.axis == "x":
        x = x_scale(mark.value)
        label = shortened(mark.label, 150)
        fits = x + len(label) * CHARACTER_PX < area.right
        note = text(label, x + (4 if fits else -4), area.top + 10, "note", None if fits else "end")
        return element("g", line(x, area.top, x, area.bottom, "mark"), note)
    y = y_scale(mark.value)
    box = _note_box(mark, y_scale, area)
    note = text(shortened(mark.label, area.right - area.left), area.right - 2, box.bottom - 3, "note", "end")
    if mark.end is None:
        return element("g", line(area.left, y, area.right, y, "mark"), note)
    end = y_scale(mark.end)
    band = element("rect", x=area.left, y=min(y, end), width=area.right - area.left, height=abs(y - end), class_="band")
    return element("g", band, note)


def _note_box(mark: Mark, y_scale: Scale, area: Box) -> Box:
    """Return where the note of a line or band across the plot is: above a line, and below a band."""
    left = area.right - len(mark.label) * CHARACTER_PX
    if mark.end is None:
        y = max(y_scale(mark.value), area.top + 12)
        return Box(left, y - 14, area.right, y - 1)
    y = max(y_scale(mark.value), y_scale(mark.end))
    return Box(left, y + 1, area.right, y + 14)


def _draw(number: int, series: Series, x_scale: Scale, y_scale: Scale) -> Markup:
    color = f"s{number % NUM_COLORS}"
    places = [(x_scale(point.x), y_scale(point.y)) for point in series.points]
    parts: list[Markup] = []
    for point, (x, y) in zip(series.points, places, strict=True):
        parts += _error_bars(point, x, y, x_scale, y_scale, color)
    if series.is_line:
        track = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(element("polyline", points=track, class_=f"line {color}"))
    if not series.is_line or len(places) <= 40:
        radius = 2.5 if series.is_line else 4 if len(places) <= 30 else 3
        for point, (x, y) in zip(series.points, places, strict=True):
            title = element("title", f"{series.name}: {_point_text(point)}")
            parts.append(element("circle", title, cx=x, cy=y, r=radius, class_=f"dot {color}"))
    return element("g", *parts)


def _error_bars(point: Point, x: float, y: float, x_scale: Scale, y_scale: Scale, color: str) -> Iterator[Markup]:
    if point.y_low is not None and point.y_high is not None:
        low, high = y_scale(point.y_low), y_scale(point.y_high)
        yield line(x, low, x, high, f"bar {color}")
        yield from (line(x - _CAP_PX, end, x + _CAP_PX, end, f"bar {color}") for end in (low, high))
    if point.x_low is not None and point.x_high is not None:
        low, high = x_scale(point.x_low), x_scale(point.x_high)
        yield line(low, y, high, y, f"bar {color}")
        yield from (line(end, y - _CAP_PX, end, y + _CAP_PX, f"bar {color}") for end in (low, high))


def _labelled(series: Sequence[Series]) -> list[Point]:
    """Return the points whose names stand beside them; all names are in the points' titles."""
    named = [(point, len(each.points) == 1) for each in series for point in each.points if point.label]
    on_lines = {(point.x, point.y) for each in series if each.is_line for point in each.points}
    has_room = len(named) <= _MAX_LABELS
    return [point for point, is_alone in named if has_room or is_alone or (point.x, point.y) in on_lines]


def _labels(plot: Plot, points: Sequence[Point], x_scale: Scale, y_scale: Scale, area: Box) -> Iterator[Markup]:
    named = [(x_scale(point.x), y_scale(point.y), shortened(point.label, 160)) for point in points]
    room = Box(area.left, area.top - 6, WIDTH_PX - 2, area.bottom)
    notes = [_note_box(mark, y_scale, area) for mark in plot.marks if mark.axis == "y"]
    for (x, y, content), placed in zip(named, place_labels(named, room, notes), strict=True):
        if placed is None:
            continue
        if not placed.is_near:
            yield _leader(x, y, placed)
        yield text(content, placed.box.left, placed.baseline, "label")


def _leader(x: float, y: float, placed: Placed) -> Markup:
    end_x = placed.box.left - 2 if placed.box.left > x else placed.box.right + 2
    return line(x, y, end_x, (placed.box.top + placed.box.bottom) / 2, "leader")


def _point_text(point: Point) -> str:
    interval = "" if point.y_low is None or point.y_high is None else f" [{point.y_low:.4g}, {point.y_high:.4g}]"
    return f"{f'{point.label} ' if point.label else ''}({point.x:.4g}, {point.y:.4g}{interval})"
