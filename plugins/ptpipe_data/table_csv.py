"""CSV and TSV files as tables, whose names and quotation marks are what the file has."""

from __future__ import annotations

import csv as python_csv
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import compute, csv, types

from ptpipe import StageError
from ptpipe_data.table_paths import DELIMITERS

if TYPE_CHECKING:
    from ptpipe_data.table_config import TableFileConfig

AS_WRITTEN = {b"ptpipe": b"as written"}
"""Metadata of columns of names that look like numbers or times."""
BLOCK_BYTES = 32 << 20
"""A row must lie in one block."""
_USUAL, _MIN_USUAL, _MAX_LINES = 0.05, 20, 20
"""Of rows and values: so many have a text of several lines, on average of fewer than so many, where these are usual."""
_EXPECTED = re.compile(r"Expected (\d+) columns, got \d+")
_MAX_SHOWN = 200
_WHOLE_FLOAT = r"^([+-]?(?:0|[1-9][0-9]*))\.0$"
"""A whole number as pandas writes it into a column where others are missing."""


def read_csv(file: Path, config: TableFileConfig, texts: pa.Schema, known: Collection[str]) -> pa.Table:
    """Return the file's columns.

    `texts`: train's columns that are text, and are text here too. `known`: all of train. Columns of names that look
    like numbers or times are text, `AS_WRITTEN`: 02134 is no 2134.
    """
    parsing = csv.ParseOptions(
        delimiter=DELIMITERS[file.suffix.lower()],
        quote_char='"' if config.quoting else False,
        newlines_in_values=config.quoting,
    )
    reading = csv.ReadOptions(column_names=config.column_names, block_size=BLOCK_BYTES)

    def read(
        column_types: dict[str, pa.DataType], null_values: list[str] | None, names: Sequence[str] = ()
    ) -> pa.Table:
        converting = csv.ConvertOptions(
            column_types=column_types,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            include_columns=names,
            null_values=null_values,
        )
        return csv.read_csv(file, reading, parsing, converting)

    booleans = [field.name for field in texts if types.is_boolean(field.type)]
    content = read(dict.fromkeys(texts.names, pa.string()) | dict.fromkeys(booleans, pa.bool_()), None)
    if config.quoting:
        _refuse_open_quotation(file, content)
    once = [field for field in content.schema if content.column_names.count(field.name) == 1]
    written = {field.name for field in once if field.name in texts.names and texts.field(field.name).metadata}
    written |= {field.name for field in once if field.name in config.name_columns - {*known} and _is_parsed(field)}
    # `NA` and `null` are missing numbers, but texts like any other: of these only the empty one is missing.
    with_nulls = {field.name for field in once if types.is_string(field.type) and content[field.name].null_count}
    for names, null_values in ((sorted(written), None), (sorted(with_nulls - written), [""])):
        columns = read(dict.fromkeys(names, pa.string()), null_values, names) if names else pa.table({})
        for name in names:
            column = _plain(columns[name]) if name in written else columns[name]
            field = pa.field(name, pa.string(), metadata=AS_WRITTEN if name in written else None)
            content = content.set_column(content.column_names.index(name), field, column)
    return content


def line_breaks(content: pa.Table) -> str | None:
    """Return what to say about values of several lines; None where there are none, or many have a few, as texts may."""
    num_values, num_breaks, first = 0, 0, []
    for number, field in enumerate(content.schema):
        if types.is_string(field.type):
            breaks = compute.count_substring_regex(content.column(number), "\r\n|\r|\n")
            has_breaks = compute.greater(breaks, 0)
            if num := compute.sum(has_breaks).as_py():
                num_values, num_breaks = num_values + num, num_breaks + compute.sum(breaks).as_py()
                first.append((compute.index(has_breaks, True).as_py(), field.name))
    is_usual = num_values >= max(_USUAL * len(content), _MIN_USUAL) and num_breaks < _MAX_LINES * num_values
    if not first or is_usual:
        return None
    row, name = min(first)
    values = "1 value in quotation marks has" if num_values == 1 else f"{num_values:,} values in quotation marks have"
    return (
        f"{values} {num_breaks:,} line break{'s'[: num_breaks > 1]}, the first in row {row + 1:,}, column {name!r}: if "
        "quotation marks are part of values, set `quoting` to false"
    )


def advice(file: Path, config: TableFileConfig, error: str) -> str:
    """Return what to do about an error of the parser, to be appended to it; empty where it is not known."""
    if file.suffix.lower() == ".csv" and "Expected 1 columns" in error and ";" in error:
        return ": .csv files separate columns by commas, and have points in numbers"
    if config.quoting and "Expected" in error and '"' in error:
        return ": if quotation marks are part of values, set `quoting` to false"
    return ""


def row_of_another_length(file: Path, config: TableFileConfig, error: str) -> str | None:
    """Return the lines of the first row that has another number of fields than it should, and both numbers.

    None for another `error` of the parser, which knows rows, but neither their lines nor, of several blocks, the first.
    """
    found = _EXPECTED.search(error)
    if found is None:
        return None
    num_expected = int(found[1])
    row = _row_of_another_length(file, config, num_expected)
    if row is None:
        return None
    place, num_fields, text = row
    fields = "1 field" if num_fields == 1 else f"{num_fields:,} fields"
    owner = "`column_names`" if config.column_names else "the header"
    return f"{place}: {fields}, where {owner} has {num_expected:,}: {text}"


def _row_of_another_length(file: Path, config: TableFileConfig, num_expected: int) -> tuple[str, int, str] | None:
    """Return its lines, its number of fields, and the beginning of what it has; None where there is none."""
    own_lines = list[str]()

    def lines() -> Iterator[str]:
        for line in stream:
            own_lines.append(line)
            yield line

    with file.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        rows = python_csv.reader(
            lines(),
            delimiter=DELIMITERS[file.suffix.lower()],
            quoting=python_csv.QUOTE_MINIMAL if config.quoting else python_csv.QUOTE_NONE,
        )
        try:
            for row in rows:
                if row and len(row) != num_expected:
                    first, last = rows.line_num - len(own_lines) + 1, rows.line_num
                    place = f"line {first:,}" if first == last else f"lines {first:,} to {last:,}"
                    return place, len(row), " ".join("".join(own_lines).split())[:_MAX_SHOWN]
                own_lines.clear()
        except python_csv.Error:  # a value is longer than it takes
            pass
    return None


def _refuse_open_quotation(file: Path, content: pa.Table) -> None:
    """Raise StageError where the last value is all that follows a quotation mark.

    The parser takes it for a value in the last column, and finds a column missing in any other.
    """
    last = content.column(content.num_columns - 1) if len(content) else None
    value = last[-1].as_py() if last is not None and types.is_string(last.type) else None
    if not value or not {"\r", "\n"} & {*value} or not value.strip("\r\n"):
        return  # line breaks alone look alike with and without a mark behind them
    end = f'"{value.replace(chr(34), chr(34) * 2)}'.encode()
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(end)))
        if stream.read() == end:
            raise StageError(
                f"{file}, row {len(content):,}, column {content.column_names[-1]!r}: a quotation mark that is never "
                "closed: close it or, if quotation marks are part of values, set `quoting` to false"
            )


def _is_parsed(field: pa.Field) -> bool:
    return not (types.is_string(field.type) or types.is_boolean(field.type) or types.is_null(field.type))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values without the white space around them, as numbers have none, and whole numbers without `.0`."""
    return compute.replace_substring_regex(compute.utf8_trim_whitespace(column), _WHOLE_FLOAT, r"\1")
