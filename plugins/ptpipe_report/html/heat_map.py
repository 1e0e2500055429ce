"""Draw a table of numbers whose size is shown as color."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from ptpipe.sections import HeatMap
from ptpipe_report.html.svg import CHARACTER_PX, element, picture, shortened, text

_WIDTH_PX, _MAX_NAME_PX = 400.0, 110.0
_MAX_WITH_NUMBERS = 14
"""Columns; more are too narrow."""
_STRONG = 0.6
"""From this strength of color on, text has the color of the page."""


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
    is_square = heat_map.is_confusion and not heat_map.is_difference
    limit = max(
        (
            abs(value)
            for row, values in enumerate(heat_map.values)
            for column, value in enumerate(values)
            if not (is_square and row == column)
        ),
        default=0,
    )
    size = min(12.0, cell * 0.42)
    yield element("rect", x=left, y=top, width=cell * len(heat_map.column_names), height=cell * len(heat_map.row_names),
                  class_="cells")  # fmt: skip
    for row, values in enumerate(heat_map.values):
        for column, value in enumerate(values):
            is_right = heat_map.is_confusion and row == column
            if not value and not (is_right and is_square):
                continue
            x, y, strength = left + column * cell, top + row * cell, abs(value) / (limit or 1)
            shown = _number(value, heat_map.is_difference)
            title = f"{heat_map.row_names[row]}, {heat_map.column_names[column]}: {shown}"
            color = "diagonal" if is_right and is_square else _color(heat_map, value, is_right)
            yield element("rect", element("title", title), x=x + 0.5, y=y + 0.5, width=cell - 1, height=cell - 1,
                          class_=color, fill_opacity=None if color == "diagonal" else f"{strength:.2f}")  # fmt: skip
            if value and len(heat_map.column_names) <= _MAX_WITH_NUMBERS:
                is_plain = color == "diagonal"
                class_ = "cell right" if is_plain else "cell strong" if strength > _STRONG else "cell"
                yield element("text", shown, x=x + cell / 2, y=y + cell / 2 + size / 3, class_=class_,
                              text_anchor="middle", font_size=size)  # fmt: skip


def _color(heat_map: HeatMap, value: float, is_right: bool) -> str:
    """Return the class of a color: where two confusions are compared, more of what is right is good."""
    is_cool = heat_map.is_difference and (value > 0) == is_right
    return "cool" if is_cool else "warm"


def _number(value: float, signed: bool = False) -> str:
    text_ = f"{value:+,.4g}" if signed else f"{value:,.4g}"
    return text_.replace("-", "\N{MINUS SIGN}")
