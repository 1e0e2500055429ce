"""Print a table of models on the console with `rich.table`, as many columns as fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from ptpipe import one_line
from ptpipe_report.comparison import Column, Table, explained_marks
from ptpipe_report.console import TerminalWriter
from ptpipe_report.formatting import figure
from ptpipe_report.theme import FAINT

_MARGIN = "  "
_UNLIMITED = 10_000
_MAX_TEXT_WIDTH = 32
_FACTS = ("data", "split", "num_samples")


def print_table(table: Table, writer: TerminalWriter) -> None:
    """Print what was compared, the table, and which columns a narrow terminal has no room for."""
    facts = _facts(table, writer.theme.separator)
    writer.line(Text.assemble(_MARGIN, (one_line(table.stage_id), "bold"), ("  " + facts, FAINT)))
    columns = fitting_columns(table, writer)
    drawn = _draw(table, columns)
    drawn.width = _width(drawn, writer)  # a log file's lines may exceed the console's nominal width
    writer.console.print(drawn, crop=writer.has_edge, no_wrap=True)
    if explained := explained_marks(columns):
        writer.entry(Text(_MARGIN), explained, FAINT)
    if len(columns) < len(table.columns):
        missing = "; ".join(column.label for column in table.columns if column not in columns)
        writer.entry(Text(_MARGIN), f"no room for: {missing}", FAINT)


def fitting_columns(table: Table, writer: TerminalWriter) -> tuple[Column, ...]:
    """Return the columns that fit the writer's width; columns of words are dropped first, then from the right."""
    kept = list(table.columns)
    while writer.width is not None and len(kept) > 1 and _width(_draw(table, kept), writer) > writer.width:
        words = [column for column in kept[1:] if column.is_text]
        kept.remove((words or kept)[-1])
    return tuple(kept)


def _width(drawn: RichTable, writer: TerminalWriter) -> int:
    return Measurement.get(writer.console, writer.console.options.update(width=_UNLIMITED), drawn).maximum


def _draw(table: Table, columns: Sequence[Column]) -> RichTable:
    drawn = RichTable(box=None, padding=(0, 0, 0, len(_MARGIN)), header_style=FAINT)
    for place, column in enumerate(columns):
        drawn.add_column(
            _heading(column),
            style="" if place else "bold",
            justify="left" if column.is_text else "right",
            no_wrap=True,
            max_width=_MAX_TEXT_WIDTH if column.is_text else None,
        )
    for row in zip(*(_texts(table, column) for column in columns), strict=True):
        drawn.add_row(*row)
    return drawn


def _heading(column: Column) -> Text:
    """Return the words of the label one below the other, which keeps columns of numbers narrow."""
    label = "model" if column.name == "name" else column.label
    words = label.split(", " if ", " in label else " ")
    return Text("\n".join(one_line(word) for word in [*words, column.unit] if word))


def _texts(table: Table, column: Column) -> list[Text]:
    texts = zip(column.texts, table.is_baseline, strict=True)
    return [Text("baseline" if marked and column.name == "drop" else one_line(text)) for text, marked in texts]


def _facts(table: Table, separator: str) -> str:
    facts = {name: table.facts[name] for name in _FACTS if name in table.facts}
    words = [value if isinstance(value, str) else str(figure(name, value)) for name, value in facts.items()]
    return one_line(separator.join(words))
