"""One CSV, TSV, JSON or Parquet file, whose errors name the file, the column and the row.

Shape legend: N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, csv, json, parquet, types

from ptpipe import StageError, nearest
from ptpipe_data import table_paths as paths

if TYPE_CHECKING:
    from ptpipe_data.table_config import TableFileConfig

_LARGEST = float(np.finfo(np.float32).max)
_IS_STRING = (types.is_string, types.is_large_string, types.is_string_view)
_JSON_SPACE = b"\xef\xbb\xbf \t\r\n"
"""Byte order mark and white space."""
_LONGEST_SPACE = 4096
_BLOCK_BYTES = 32 << 20
"""A row must lie in one block."""


@dataclass(frozen=True)
class TableFile:
    """A file's rows, of which there is at least one. Errors count them from 1, without the header."""

    path: Path
    content: pa.Table
    row_names: Sequence[str] = ()
    """What rows are called that have names."""

    def row_name(self, row: int) -> str:
        """Return what a row is called: by default its number, from 1. `row`: counted from 0."""
        return self.row_names[row] if self.row_names else str(row + 1)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column. Raises StageError, with the nearest name, where there is none."""
        names = self.content.column_names
        if name not in names:
            close = nearest(name, names)
            hint = f"did you mean {close!r}?" if close else f"it has {', '.join(names)}"
            if len(names) == 1 and ";" in names[0] and self.path.suffix.lower() == ".csv":
                hint = f"it has one, {names[0]!r}: .csv files separate columns by commas"
            raise StageError(f"{self.path} has no column {name!r} ({hint})")
        if names.count(name) > 1:
            raise StageError(f"{self.path} has more than one column {name!r}")
        return self.content.column(name)

    def numbers(self, name: str, hint: str = "", *, allow_missing: bool = False) -> npt.NDArray[np.float64]:
        """Return a numeric column, (N,), with NaN for missing values. Raises StageError for what float32 can't hold.

        `hint`: what else to do about a missing value than to remove its row.
        """
        column = self.column(name)
        if types.is_null(column.type):
            raise self.error(name, 0, "a missing value, as all are: remove the column")
        if types.is_temporal(column.type):
            raise self.error(name, 0, "a date or time: turn it into a number, or leave the column out")
        if not any(of(column.type) for of in (types.is_integer, types.is_floating, types.is_decimal)):
            row = next((row for row, value in enumerate(column.to_pylist()) if not _is_number(value)), 0)
            raise self.error(name, row, "which is no number")
        values_N: npt.NDArray[np.float64] = compute.cast(column, pa.float64(), safe=False).to_numpy()
        for wrong_N, problem in (
            (np.isnan(values_N) & (not allow_missing), f"a missing value; remove the row{hint}"),
            (np.isinf(values_N), "which is infinite"),
            (np.abs(values_N) > _LARGEST, "which is more than float32 holds"),
        ):
            if wrong_N.any():
                raise self.error(name, int(wrong_N.argmax()), problem)
        return values_N

    def flags(self, name: str) -> npt.NDArray[np.float32]:
        """Return a column of 0 and 1, or of booleans, float32 (N,)."""
        if types.is_boolean(self.column(name).type):
            return np.array([text == "true" for text in self.texts(name)], dtype=np.float32)
        values_N = self.numbers(name)
        wrong_N = ~np.isin(values_N, (0, 1))
        if wrong_N.any():
            raise self.error(name, int(wrong_N.argmax()), "which is neither 0 nor 1")
        return values_N.astype(np.float32)

    def texts(self, name: str) -> list[str]:
        """Return a column's values as text. Raises StageError for a missing one."""
        return [value for value in self.texts_or_none(name) if value is not None]

    def texts_or_none(self, name: str, hint: str = "", *, allow_missing: bool = False) -> list[str | None]:
        """Return a column's values as text, with None for missing ones. `hint`: as for `numbers`."""
        column = self.column(name)
        if column.null_count and not allow_missing:
            row = compute.is_null(column).to_pylist().index(True)
            raise self.error(name, row, f"a missing value; remove the row{hint}")
        if types.is_null(column.type):
            raise self.error(name, 0, "a missing value, as all are: remove the column")
        if types.is_nested(column.type):
            raise self.error(name, 0, "which is no text")
        values: list[str | None] = compute.cast(column, pa.string()).to_pylist()
        return values

    def words(self, name: str) -> list[list[str]]:
        """Return a column of lists of text. Raises StageError for any other, and for an empty or missing list."""
        column = self.column(name)
        is_list = any(of(column.type) for of in (types.is_list, types.is_large_list, types.is_fixed_size_list))
        if not is_list or not any(of(column.type.value_type) for of in _IS_STRING):
            raise self.error(name, 0, "which is no list of texts")
        lists: list[list[str]] = column.to_pylist()
        for row, words in enumerate(lists):
            if not words:
                raise self.error(name, row, "an empty list; remove the row")
            if not all(words):
                raise self.error(name, row, "in which a value is missing")
        return lists

    def is_missing(self, name: str) -> npt.NDArray[np.bool_]:
        """Return which values of a column are missing, (N,)."""
        missing_N: npt.NDArray[np.bool_] = compute.is_null(self.column(name)).to_numpy()
        return missing_N

    def refuse_mistyped_numbers(self, name: str) -> None:
        """Raise StageError for a column of text that is mostly numbers, at the first value that is none."""
        texts = {row: text for row, text in enumerate(self.texts_or_none(name, allow_missing=True)) if text is not None}
        numbers = {text for text in set(texts.values()) if _is_number(text)}
        num_numbers = sum(text in numbers for text in texts.values())
        if len(texts) / 2 <= num_numbers < len(texts):
            row = next(row for row, text in texts.items() if text not in numbers)
            raise self.error(name, row, "which is no number, as most are: put it right, or name it in `categorical`")

    def error(self, name: str, row: int, problem: str) -> StageError:
        """Return the error about a value. `row`: counted from 0."""
        value = self.content.column(name)[row].as_py()
        text = repr(value) if isinstance(value, str) else str(value)
        found = "" if value is None or value != value else f"{text}, "
        return StageError(f"{self.path}, row {self.row_name(row)}, column {name!r}: {found}{problem}")


def is_text(type_: pa.DataType) -> bool:
    """Return whether values of this type are categories, whatever they are: text, booleans."""
    return any(of(type_) for of in (*_IS_STRING, types.is_dictionary, types.is_boolean))


def read_files(config: TableFileConfig, schema: pa.Schema | None = None) -> dict[str, TableFile]:
    """Return the file of train, and those of val and test where they have their own. `schema`: as for `read_table`."""
    files: dict[str, TableFile] = {}
    for name, path in config.paths.items():
        files[name] = read_table(path, config, files["train"].content.schema if files else schema)
    return files


def read_table(path: str, config: TableFileConfig, schema: pa.Schema | None = None) -> TableFile:
    """Read a file. Raises StageError where it can't be read as what its name says, and where it has no rows.

    `schema`: the columns that are text there are text here too, whatever they look like.
    """
    file = paths.find_file(path)
    texts = pa.schema([field for field in schema or () if is_text(field.type)])
    if config.column_names and file.suffix.lower() not in paths.DELIMITERS:
        raise StageError(f"column_names names the columns of .csv and .tsv files; {file} has names of its own")
    try:
        match file.suffix.lower():
            case ".parquet":
                content = parquet.read_table(file)
            case suffix if suffix in paths.JSON_SUFFIXES:
                content = _read_json(file, texts)
            case _:
                content = _read_text(file, config, texts)
        content.validate(full=True)
        binary = [field.name for field in content.schema if types.is_binary(field.type)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StageError(f"{file} can't be read: {' '.join(str(error).split())[:300]}") from error
    if binary:
        raise StageError(f"{file} can't be read: column {binary[0]!r} is not UTF-8 text")
    if not len(content):
        raise StageError(f"{file} has no rows")
    return TableFile(file, content)


def _read_json(file: Path, texts: pa.Schema) -> pa.Table:
    lines = _lines_of_array(file)

    def read(schema: pa.Schema | None) -> pa.Table:
        source = file if lines is None else pa.BufferReader(lines)
        return json.read_json(source, json.ReadOptions(block_size=_BLOCK_BYTES), json.ParseOptions(schema))

    content = read(texts)  # without a schema, texts that look like times would be read as these
    empty = [name for name in texts.names if content.column(name).null_count == len(content)]
    if empty:  # a schema adds the columns that the file does not have
        found = read(None).column_names
        content = content.drop_columns([name for name in empty if name not in found])
    return content


def _lines_of_array(file: Path) -> bytes | None:
    """Return the objects of a .json file's array, one a line; None where the file has a line for each already."""
    with file.open("rb") as stream:
        if file.suffix.lower() != ".json" or not stream.read(_LONGEST_SPACE).lstrip(_JSON_SPACE).startswith(b"["):
            return None
        stream.seek(0)
        try:
            records = loads(stream.read())
        except RecursionError as error:
            raise ValueError("its arrays and objects are nested too deeply") from error
    if wrong := next((number for number, record in enumerate(records, 1) if not isinstance(record, dict)), None):
        raise ValueError(f"element {wrong} of its array is not an object")
    return "\n".join(map(dumps, records)).encode()


def _read_text(file: Path, config: TableFileConfig, texts: pa.Schema) -> pa.Table:
    delimiter = paths.DELIMITERS[file.suffix.lower()]
    quote = '"' if config.quoting else False
    parsing = csv.ParseOptions(delimiter=delimiter, quote_char=quote, newlines_in_values=config.quoting)
    reading = csv.ReadOptions(column_names=config.column_names, block_size=_BLOCK_BYTES)
    converting = csv.ConvertOptions(
        column_types={field.name: field.type for field in texts},
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    content = csv.read_csv(file, reading, parsing, converting)
    # `NA` and `null` are missing numbers, but texts like any other: of these only the empty one is missing.
    names = [field.name for field in content.schema if types.is_string(field.type)]
    names = [name for name in names if content.column_names.count(name) == 1 and content.column(name).null_count]
    if names:
        converting.include_columns, converting.null_values = names, [""]
        converting.column_types = {name: pa.string() for name in names}
        columns = csv.read_csv(file, reading, parsing, converting)
        for name in names:
            content = content.set_column(content.column_names.index(name), name, columns.column(name))
    return content


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return value is None
    return True
