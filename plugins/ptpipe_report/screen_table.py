"""A comparison as a table on the console, as many columns as fit."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ptpipe_report.comparison import Column, Table
from ptpipe_report.figures import figure
from ptpipe_report.look import FAINT
from ptpipe_report.paper import Paper
from ptpipe_report.wording import one_line

_MARGIN, _GAP = 2, 2
_WIDEST_TEXT = 32
_FACTS = ("data", "split", "num_samples")


def draw(table: Table, paper: Paper) -> None:
    """Write what was compared and the table, and how many columns it lacks where the terminal is too narrow."""
    paper.line(Text.assemble(" " * _MARGIN, (one_line(table.stage_id), "bold"), ("  " + _facts(table, paper), FAINT)))
    columns = fitting(table.columns, paper.width)
    headings = [_heading(column) for column in columns]
    height = max(map(len, headings))
    for level in range(height):
        # Headings stand on the table: shorter ones begin further down.
        words = [heading[level - height] if level >= height - len(heading) else "" for heading in headings]
        paper.line(_row(columns, words, FAINT))
    cells = [[one_line(text) for text in column.texts] for column in columns]
    for place, is_baseline in enumerate(table.is_baseline):
        words = [
            "baseline" if is_baseline and column.name == "drop" else texts[place]
            for column, texts in zip(columns, cells, strict=True)
        ]
        paper.line(_row(columns, words, ""))
    if len(columns) < len(table.columns):
        missing = "; ".join(column.label for column in table.columns if column not in columns)
        paper.entry(Text(" " * _MARGIN), f"no room here for: {missing}", FAINT)


def fitting(columns: tuple[Column, ...], width: int | None) -> tuple[Column, ...]:
    """The columns that fit into that many characters; the wordy ones go first, then those on the right."""
    kept = list(columns)
    while width is not None and len(kept) > 1 and _MARGIN - _GAP + sum(map(_width_in_row, kept)) > width:
        wordy = [column for column in kept[1:] if column.is_text]
        kept.remove((wordy or kept)[-1])
    return tuple(kept)


def _width_in_row(column: Column) -> int:
    return _width(column) + _GAP


def _width(column: Column) -> int:
    texts = [one_line(text) for text in column.texts]
    longest = max(cell_len(text) for text in [*texts, *_heading(column), "baseline" if column.name == "drop" else ""])
    return min(longest, _WIDEST_TEXT) if column.is_text else longest


def _heading(column: Column) -> list[str]:
    label = "model" if column.name == "name" else column.label
    parts = label.split(", " if ", " in label else " ")
    return [one_line(part) for part in [*parts, column.unit] if part]


def _row(columns: tuple[Column, ...], words: list[str], style: str) -> Text:
    cells = []
    for column, word in zip(columns, words, strict=True):
        width = _width(column)
        padding = " " * (width - cell_len(word))
        cells.append(set_cell_size(word, width) if column.is_text else padding + word)
    row = Text(" " * _MARGIN + (" " * _GAP).join(cells).rstrip(), style)
    if not style:
        row.stylize("bold", _MARGIN, _MARGIN + len(cells[0]))
    return row


def _facts(table: Table, paper: Paper) -> str:
    told = {name: table.facts[name] for name in _FACTS if name in table.facts}
    words = [value if isinstance(value, str) else str(figure(name, value)) for name, value in told.items()]
    return one_line(paper.look.separator.join(words))
