"""Draw a table of numbers whose size is shown as color."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from ptpipe.sections import HeatMap
from ptpipe_report.html.svg import CHARACTER_PX, element, picture, shortened, text

_WIDTH_PX, _MAX_NAME_PX = 400.0, 110.0
_MAX_WITH_NUMBERS = 14
"""Columns; more are too narrow."""


def draw_heat_map(heat_map: HeatMap) -> Markup:
    """Return the SVG. Where the diagonal is what is right, the other cells alone are colored."""
    left = 26 + min(_MAX_NAME_PX, max((len(name) for name in heat_map.row_names), default=0) * CHARACTER_PX)
    cell = min(56.0, (_WIDTH_PX - left - 4) / max(1, len(heat_map.column_names)))
    is_turned = max((len(name) for name in heat_map.column_names), default=0) * CHARACTER_PX > cell - 4
    longest = max((len(shortened(name, 90)) for name in heat_map.column_names), default=0)
    top = 24 + (longest * CHARACTER_PX if is_turned else 14)
    height = top + cell * len(heat_map.row_names) + 6
    parts = [*_names(heat_map, left, top, cell, is_turned), *_cells(heat_map, left, top, cell)]
    middle = top + cell * len(heat_map.row_names) / 2
    axes = [
        text(heat_map.column_label, left + cell * len(heat_map.column_names) / 2, 12, "tick", "middle"),
        element("text", heat_map.row_label, x=12, y=middle, class_="tick", transform=f"rotate(-90 12 {middle:.1f})",
                text_anchor="middle"),
    ]  # fmt: skip
    return picture(_WIDTH_PX, height, describe(heat_map), *axes, *parts)


def describe(heat_map: HeatMap) -> str:
    """Return the largest values, in words."""
    cells = [
        (abs(value), f"{row}, {column}: {_number(value)}")
        for row, values in zip(heat_map.row_names, heat_map.values, strict=True)
        for column, value in zip(heat_map.column_names, values, strict=True)
        if value and not (heat_map.is_confusion and row == column)
    ]
    cells.sort(key=lambda cell: -cell[0])
    shown = "; ".join(words for _, words in cells[:10]) or "nothing"
    return f"{heat_map.title}, {heat_map.row_label} and {heat_map.column_label}. Largest: {shown}."


def _names(heat_map: HeatMap, left: float, top: float, cell: float, is_turned: bool) -> Iterator[Markup]:
    for row, name in enumerate(heat_map.row_names):
        shown = shortened(name, _MAX_NAME_PX)
        yield text(shown, left - 5, top + (row + 0.5) * cell + 4, "tick", "end", title=name)
    for column, name in enumerate(heat_map.column_names):
        x = left + (column + 0.5) * cell
        if is_turned:
            place = f"rotate(-90 {x + 4:.1f} {top - 5:.1f})"
            yield element("text", shortened(name, 90), x=x + 4, y=top - 5, class_="tick", transform=place)
        else:
            yield text(name, x, top - 6, "tick", "middle")


def _cells(heat_map: HeatMap, left: float, top: float, cell: float) -> Iterator[Markup]:
    colored = [
        abs(value)
        for row, values in enumerate(heat_map.values)
        for column, value in enumerate(values)
        if not (heat_map.is_confusion and row == column)
    ]
    limit = max(colored, default=0) or 1
    size = min(12.0, cell * 0.42)
    for row, values in enumerate(heat_map.values):
        for column, value in enumerate(values):
            is_plain = heat_map.is_confusion and row == column
            x, y = left + column * cell, top + row * cell
            yield _cell(heat_map, row, column, value, (x, y, cell), 0.0 if is_plain else abs(value) / limit)
            if value and len(heat_map.column_names) <= _MAX_WITH_NUMBERS:
                class_ = "cell right" if is_plain else "cell strong" if abs(value) > 0.6 * limit else "cell"
                yield element("text", _number(value, heat_map.is_difference), x=x + cell / 2, y=y + cell / 2 + size / 3,
                              class_=class_, text_anchor="middle", font_size=size)  # fmt: skip


def _cell(
    heat_map: HeatMap, row: int, column: int, value: float, place: tuple[float, float, float], strength: float
) -> Markup:
    x, y, cell = place
    names = f"{heat_map.row_names[row]}, {heat_map.column_names[column]}: {_number(value, heat_map.is_difference)}"
    is_better = heat_map.is_difference and (value < 0)
    class_ = "cool" if is_better else "warm"
    fill = element("rect", element("title", names), x=x + 0.5, y=y + 0.5, width=cell - 1, height=cell - 1,
                   class_=class_, fill_opacity=f"{strength:.2f}")  # fmt: skip
    if heat_map.is_confusion and row == column:
        fill = element("rect", element("title", names), x=x + 0.5, y=y + 0.5, width=cell - 1, height=cell - 1,
                       class_="diagonal")  # fmt: skip
    return fill


def _number(value: float, signed: bool = False) -> str:
    text_ = f"{value:+,.4g}" if signed else f"{value:,.4g}"
    return text_.replace("-", "\N{MINUS SIGN}")
