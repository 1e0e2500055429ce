"""Render a run's report: from events and record, which are plain data, to one HTML file.

The page needs neither network nor script, and its Content-Security-Policy allows none: styles are admitted by their
hash, pictures as `data:` addresses. Whatever comes from manifests, data or plugins is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ptpipe import Notice, RunFinished, RunStarted, StageFinished, one_line, sections
from ptpipe_report import run_summary
from ptpipe_report.comparison import Column, Table, metric_tables, tables
from ptpipe_report.formatting import figure, joined, number, seconds_text
from ptpipe_report.html.artifacts import comparisons_of
from ptpipe_report.html.dot_plot import draw_dot_plot
from ptpipe_report.html.heat_map import draw_heat_map
from ptpipe_report.html.plot import draw_plot
from ptpipe_report.html.provenance import provenance
from ptpipe_report.html.stage_graph import draw_stage_graph
from ptpipe_report.html.trade_offs import trade_off_plots
from ptpipe_report.html.verdict import banner

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_IMAGE_BYTES, _MAX_FIGURE_BYTES = 120_000, 200_000
"""Of all pictures of a report, and of all its figures, so that it stays small enough for a mail."""
_MAX_ROWS = 200


def render(
    started: RunStarted,
    finished: RunFinished,
    run_notices: Sequence[Notice] = (),
    record: Mapping[str, Any] | None = None,
    at: datetime | None = None,
) -> str:
    """Return the whole file.

    `run_notices`: those that belong to no stage. `record`: the content of `record.json`, for versions and options.
    `at`: when the run ended; now by default.
    """
    notices = run_summary.Notices()
    for notice in run_notices:
        notices.add(notice)
    for stage in finished.stages:
        notices.add_all(stage)
    comparisons, gates = comparisons_of(finished.stages), run_summary.gates(finished.stages)
    candidates = run_summary.candidates_of(gates)
    outcomes = {stage.stage_id: _outcome(stage, gates) for stage in finished.stages}
    context = {
        "name": finished.name,
        "run": finished,
        "at": f"{at or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "banner": banner(finished, comparisons),
        "notices": list(notices),
        "comparisons": [(of, trade_off_plots(of, candidates, gates)) for of in comparisons],
        "candidates": candidates,
        "other_tables": _other_tables(finished.stages, {of.stage_id for of in comparisons}),
        "sections": sorted(finished.sections, key=lambda section: [*sections.Topic].index(section.topic)),
        "graph": draw_stage_graph(finished.stages, started.upstream, outcomes) if finished.stages else "",
        "stages": [_stage_row(place, stage, outcomes) for place, stage in enumerate(finished.stages, 1)],
        "provenance": provenance(started, finished, record or {}),
        "metric_tables": [(f"{of.stage_id}: {name}", *_cells(of)) for name, of in metric_tables(finished.stages)],
    }
    return page(context)


def page(context: Mapping[str, Any]) -> str:
    """Return the page with this content of the template."""
    css = _stylesheet()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            context,
            css=Markup(css),  # noqa: S704  # a file of this package
            csp=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'",
            room=_Room(),
            max_rows=_MAX_ROWS,
        )
    )


@cache
def _stylesheet() -> str:
    return (_TEMPLATES / "style.css").read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=_visible,
    )
    environment.filters |= {
        "dot_plot": _drawn(draw_dot_plot),
        "heat_map": _drawn(draw_heat_map),
        "plot": _drawn(draw_plot),
        "kind": lambda block: type(block).__name__,
        "cell": _cell_text,
        "is_number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        "heading": lambda name: figure(name, None).label or name,
        "number": number,
    }
    return environment


def _drawn(draw: Callable[[Any], Markup]) -> Callable[[Any], Markup]:
    """Return the function that draws a plugin's block; one that can't be drawn does not take the report with it."""

    def drawn(block: Any) -> Markup:
        try:
            return draw(block)
        except Exception as error:  # noqa: BLE001  # numbers that are none
            return Markup("<p>It can\N{RIGHT SINGLE QUOTATION MARK}t be drawn: {}</p>").format(one_line(str(error)))

    return drawn


def _visible(value: object) -> object:
    """Make characters visible that hide or reverse text; line breaks are kept."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(map(one_line, value.split("\n")))
    return value


class _Room:
    """Hands out figures and pictures as long as there is room for them."""

    def __init__(self) -> None:
        self._left, self._left_for_images = _MAX_FIGURE_BYTES, _MAX_IMAGE_BYTES
        self.num_left_out = 0
        """Pictures, so far."""

    def admit(self, figure: Markup) -> Markup:
        """Return the figure; nothing where there is no room."""
        if len(figure) > self._left:
            return Markup("")
        self._left -= len(figure)
        return figure

    def address(self, image: sections.Image) -> str:
        """Return the picture as an address; empty where there is no room, or it is no PNG file."""
        if not image.png.startswith(b"\x89PNG") or len(image.png) > self._left_for_images:
            self.num_left_out += 1
            return ""
        self._left_for_images -= len(image.png)
        return f"data:image/png;base64,{base64.b64encode(image.png).decode()}"


def _outcome(stage: StageFinished, gates: Iterable[run_summary.Gate]) -> str:
    """Return how a stage ended: of a gate, its decision."""
    return next((gate.decision for gate in gates if gate.stage_id == stage.stage_id), str(stage.outcome))


def _stage_row(place: int, stage: StageFinished, outcomes: Mapping[str, str]) -> dict[str, Any]:
    return {
        "place": place,
        "stage": stage,
        "outcome": outcomes[stage.stage_id],
        "time": "" if stage.outcome in run_summary.UNTIMED else seconds_text(stage.seconds),
        "result": joined(run_summary.stage_figures(stage)) or stage.message,
    }


def _other_tables(stages: Sequence[StageFinished], shown: set[str]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield comparisons of another shape, as the plain tables that other reports show."""
    for table in tables(stages):
        if table.stage_id not in shown:
            yield table.stage_id, *_cells(table)


def _cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows."""
    texts = zip(*(column.texts for column in table.columns), strict=True)
    return [_heading(column) for column in table.columns], [list(row) for row in texts]


def _heading(column: Column) -> str:
    return f"{column.label}, {column.unit}" if column.unit else column.label


def _cell_text(value: sections.Cell, name: str) -> str:
    """Return a cell of a section's table, in the unit that its column's name implies."""
    if value is None:
        return ""
    return value if isinstance(value, str) else figure(name, value).text
