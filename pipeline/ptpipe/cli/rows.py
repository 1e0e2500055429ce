"""Tables whose rows have columns by name, for commands that list runs or models: sorted, narrowed, in four formats."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import click

from ptpipe.artifact import JSON
from ptpipe.cli.common import echo, print_table, result_stream
from ptpipe.errors import Problem, UsageError, nearest
from ptpipe.printable import one_line

_GAP = 2
_MIN_COLUMNS = 4
"""Left in a narrow terminal, whose table is folded then."""
_INLINE_MARKUP = re.compile(r"([\\`*_\[\]<>|~&$#@])")
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid #8885; text-align: left; white-space: nowrap; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>
<thead><tr>{headings}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
{notes}
</body>
</html>"""


class Cell(NamedTuple):
    """A value to sort by, and how it is written."""

    value: JSON
    text: str

    @classmethod
    def of(cls, value: JSON) -> Cell:
        """Return a cell of `value`: numbers with six significant digits, nothing for None."""
        if value is None or isinstance(value, str):
            return cls(value, value or "")
        return cls(value, f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False))


Row: TypeAlias = Mapping[str, Cell]
"""Cells by the name of their column; a column may be missing."""
F = TypeVar("F", bound=Callable[..., Any])


def table_options(command: F) -> F:
    """Add the options `--sort`, `--json`, `--md` and `--html` to `command`: parameters `sort_by`, `table_format`."""
    formats = (
        ("json", "Print JSON, for programs."),
        ("md", "Print Markdown."),
        ("html", "Print an HTML page of its own."),
    )
    for name, help_ in reversed(formats):
        command = click.option(f"--{name}", "table_format", flag_value=name, help=help_)(command)
    return click.option("--sort", "sort_by", metavar="COLUMN", help="Sort by this column; -COLUMN: the largest first.")(
        command
    )


def column_names(rows: Iterable[Row]) -> list[str]:
    """Return the columns of all rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def sorted_rows(rows: Sequence[Row], column: str | None) -> list[Row]:
    """Return `rows` by the values of a column, numbers before words; rows without a value are last.

    `column`: `-size` for the largest first; None leaves the order. Raises UsageError where no row has the column.
    """
    if column is None:
        return list(rows)
    names = column_names(rows)
    is_descending = column not in names and column.startswith("-")
    name = column.removeprefix("-") if is_descending else column
    if name not in names:
        problem = Problem(f"--sort {column}: there is no such column", suggestion=nearest(name, names))
        raise UsageError(str(problem) if problem.suggestion else f"{problem}; there are {', '.join(names)}")

    def order(row: Row) -> tuple[bool, float, str]:
        value = row[name].value
        is_number = isinstance(value, int | float)
        return not is_number, float(value) if isinstance(value, int | float) else 0.0, str(value)

    having = [row for row in rows if name in row and row[name].value is not None]
    without = [row for row in rows if name not in row or row[name].value is None]
    return [*sorted(having, key=order, reverse=is_descending), *without]


def split_columns(rows: Sequence[Row], always: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the columns to show, and the text of those that have one value in all rows.

    `always`: columns that are shown even so. Of a single row, all are shown.
    """
    names = column_names(rows)
    texts = {name: {row[name].text if name in row else "" for row in rows} for name in names}
    same = {name: next(iter(found)) for name, found in texts.items() if len(found) == 1 and name not in always}
    same = same if len(rows) > 1 else {}
    return [name for name in names if name not in same], {name: text for name, text in same.items() if text}


def print_rows(
    rows: Sequence[Row], always: Sequence[str], table_format: str | None, title: str, notes: Sequence[str] = ()
) -> None:
    """Print `rows` as a table without the columns that are the same in all rows, which a line below it names.

    `always`: columns that are shown even so. `table_format`: `md`, `html`, None for a terminal. `title`: of the page.
    `notes`: lines below.
    """
    columns, same = split_columns(rows, always)
    if same:
        notes = [*notes, "the same in all: " + ", ".join(f"{name} {text}" for name, text in same.items())]
    if table_format == "html":
        click.echo(html_page(title, columns, rows, notes), result_stream())
    elif table_format == "md":
        click.echo("\n\n".join([markdown_table(columns, rows), *map(_markdown, notes)]), result_stream())
    else:
        shown = _fitting(columns, rows)
        print_table(shown, [_texts(row, shown) for row in rows])
        if hidden := columns[len(shown) :]:
            notes = [*notes, f"no room for: {', '.join(hidden)}"]
        echo("\n".join(notes)) if notes else None


def markdown_table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a GitHub-flavored table; cells are escaped."""
    lines = [[_markdown(name) for name in columns], ["---"] * len(columns)]
    lines += [[_markdown(text) for text in _texts(row, columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def html_page(title: str, columns: Sequence[str], rows: Iterable[Row], notes: Sequence[str] = ()) -> str:
    """Return a whole page that needs nothing else and runs nothing; all text in it is escaped."""
    return _PAGE.format(
        title=_html(title),
        headings="".join(f"<th>{_html(name)}</th>" for name in columns),
        rows="\n".join(f"<tr>{''.join(_html_cell(row.get(name)) for name in columns)}</tr>" for row in rows),
        notes="\n".join(f"<p>{_html(note)}</p>" for note in notes),
    )


def _texts(row: Row, columns: Iterable[str]) -> list[str]:
    return [row[name].text if name in row else "" for name in columns]


def _fitting(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the first columns, as many as a terminal is wide enough for; all of them in a pipe."""
    if not result_stream().isatty():
        return list(columns)
    left, shown = shutil.get_terminal_size().columns, list[str]()
    for name in columns:
        left -= max(len(one_line(text)) for text in (name, *(_texts(row, [name])[0] for row in rows))) + _GAP
        if left + _GAP < 0 and len(shown) >= _MIN_COLUMNS:
            break
        shown.append(name)
    return shown


def _markdown(text: str) -> str:
    return _INLINE_MARKUP.sub(r"\\\1", one_line(text))


def _html(text: str) -> str:
    return html.escape(one_line(text))


def _html_cell(cell: Cell | None) -> str:
    attribute = ' class="number"' if cell is not None and isinstance(cell.value, int | float) else ""
    return f"<td{attribute}>{_html(cell.text if cell else '')}</td>"
