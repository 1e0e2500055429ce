"""Elements of SVG, with everything escaped. Colors are classes of `style.css`, so that a dark page has others."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from ptpipe import one_line

CHARACTER_PX = 7.1
"""The width of a character of the labels, which are 12 px high, in a wide font."""


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element; `class_` is the attribute `class`, other underscores are hyphens, None leaves one out."""
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else _number(value))}"'
        for name, value in ((name, _visible(value)) for name, value in attributes.items())
        if value is not None
    )
    content = "".join(child if isinstance(child, Markup) else escape(one_line(child)) for child in children)
    return Markup(f"<{tag}{shown}>{content}</{tag}>" if content else f"<{tag}{shown}/>")  # noqa: S704  # escaped above


def text(content: str, x: float, y: float, class_: str = "", anchor: str | None = None, title: str = "") -> Markup:
    """Return a label. `anchor`: `middle` or `end`. `title`: shown where the pointer rests."""
    children = (content, element("title", title)) if title else (content,)
    return element("text", *children, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def picture(width: float, height: float, description: str, *children: Markup) -> Markup:
    """Return a whole SVG, which is scaled to its place. `description`: for those who can't see it."""
    view = f"0 0 {_number(width)} {_number(height)}"
    return element("svg", *children, viewBox=view, width=width, height=height, role="img", aria_label=description)


def shortened(content: str, width_px: float) -> str:
    """Return the text, cut to what fits a width."""
    limit = max(2, int(width_px / CHARACTER_PX))
    return content if len(content) <= limit else content[: limit - 1] + "…"


def shortened_names(names: Sequence[str], width_px: float) -> list[str]:
    """Return names, cut to what fits a width: at the end, in the middle or at the start, where most stay different."""
    limit = max(2, int(width_px / CHARACTER_PX))

    def cut(name: str, num_first: int) -> str:
        num_last = limit - 1 - num_first
        return name if len(name) <= limit else f"{name[:num_first]}…{name[len(name) - num_last :]}"

    return max(
        ([cut(name, first) for name in names] for first in (limit - 1, limit // 3, 0)), key=lambda of: len({*of})
    )


def _visible(value: str | float | None) -> str | float | None:
    return one_line(value) if isinstance(value, str) else value


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
