"""Draw the stages of a run as a graph, with outcome and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from ptpipe import StageFinished
from ptpipe_report.formatting import seconds_text
from ptpipe_report.html.svg import element, picture, shortened, text

_BOX_WIDTH_PX, _BOX_HEIGHT_PX, _GAP_X_PX, _GAP_Y_PX = 140.0, 38.0, 16.0, 26.0
_TIMED = ("done", "failed", "interrupted", "refused", "undecided")


def draw_stage_graph(
    stages: Sequence[StageFinished], upstream: Mapping[str, Sequence[str]], outcomes: Mapping[str, str]
) -> Markup:
    """Return the SVG: each stage below those that it has inputs from. `outcomes`: what to show for each stage."""
    levels = _levels([stage.stage_id for stage in stages], upstream)
    widest = max(len(level) for level in levels)
    width = widest * (_BOX_WIDTH_PX + _GAP_X_PX)
    places: dict[str, tuple[float, float]] = {}
    for row, level in enumerate(levels):
        indent = (width - len(level) * (_BOX_WIDTH_PX + _GAP_X_PX) + _GAP_X_PX) / 2
        for column, stage_id in enumerate(level):
            places[stage_id] = (indent + column * (_BOX_WIDTH_PX + _GAP_X_PX), 2 + row * (_BOX_HEIGHT_PX + _GAP_Y_PX))
    height = len(levels) * (_BOX_HEIGHT_PX + _GAP_Y_PX) - _GAP_Y_PX + 4
    edges = [
        _edge(places[above], places[below]) for above, below in _shown_edges(upstream) if {above, below} <= {*places}
    ]
    boxes = [_box(stage, places[stage.stage_id], outcomes[stage.stage_id]) for stage in stages]
    description = "The stages and their inputs: " + "; ".join(
        f"{stage.stage_id} ({outcomes[stage.stage_id]})"
        + (f" from {', '.join(upstream[stage.stage_id])}" if upstream.get(stage.stage_id) else "")
        for stage in stages
    )
    return picture(width, height, description, *edges, *boxes)


def _levels(stage_ids: Sequence[str], upstream: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the stages by the length of the longest way to them, each level ordered by where its inputs are."""
    depth: dict[str, int] = {}
    for stage_id in stage_ids:  # in run order: those above come first
        depth[stage_id] = 1 + max((depth.get(above, -1) for above in upstream.get(stage_id, ())), default=-1)
    levels: list[list[str]] = [[] for _ in range(1 + max(depth.values(), default=0))]
    place: dict[str, float] = {}
    for stage_id in sorted(stage_ids, key=lambda name: depth[name]):
        levels[depth[stage_id]].append(stage_id)
    for level in levels:
        level.sort(key=lambda name: _mean([place[above] for above in upstream.get(name, ()) if above in place]))
        place |= {name: number - len(level) / 2 for number, name in enumerate(level)}
    return levels


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _shown_edges(upstream: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield the edges that no longer way goes beside."""
    above_all: dict[str, set[str]] = {}
    for stage_id, above in upstream.items():
        above_all[stage_id] = set(above).union(*(above_all.get(name, set()) for name in above))
        for name in above:
            if not any(name in above_all.get(other, ()) for other in above if other != name):
                yield name, stage_id


def _edge(above: tuple[float, float], below: tuple[float, float]) -> Markup:
    x1, y1 = above[0] + _BOX_WIDTH_PX / 2, above[1] + _BOX_HEIGHT_PX
    x2, y2 = below[0] + _BOX_WIDTH_PX / 2, below[1]
    bend = min(40.0, (y2 - y1) / 2)
    return element(
        "path",
        d=f"M{x1:.1f},{y1:.1f} C{x1:.1f},{y1 + bend:.1f} {x2:.1f},{y2 - bend:.1f} {x2:.1f},{y2:.1f}",
        class_="edge",
    )


def _box(stage: StageFinished, place: tuple[float, float], outcome: str) -> Markup:
    x, y = place
    duration = f" · {seconds_text(stage.seconds)}" if stage.outcome in _TIMED else ""
    return element(
        "g",
        element("title", f"{stage.stage_id} ({stage.kind}): {outcome}{duration}"),
        element("rect", x=x, y=y, width=_BOX_WIDTH_PX, height=_BOX_HEIGHT_PX, rx=5, class_=f"box {outcome}"),
        text(shortened(stage.stage_id, _BOX_WIDTH_PX - 16), x + 9, y + 16, "name"),
        text(f"{outcome}{duration}", x + 9, y + 31, "tick"),
    )
