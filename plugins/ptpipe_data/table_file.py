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
from pyarrow import compute, json, parquet, types

from ptpipe import StageError, nearest
from ptpipe_data import table_paths as paths
from ptpipe_data.table_csv import BLOCK_BYTES, advice, line_breaks, read_csv, row_of_another_length

if TYPE_CHECKING:
    from ptpipe_data.table_config import TableFileConfig

_LARGEST = float(np.finfo(np.float32).max)
_IS_STRING = (types.is_string, types.is_large_string, types.is_string_view)
_JSON_SPACE = b"\xef\xbb\xbf \t\r\n"
"""Byte order mark and white space."""
_LONGEST_SPACE = 4096
_IS_BINARY = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
_EXACT = 2**53
"""Above, float64 rounds whole numbers."""


@dataclass(frozen=True)
class TableFile:
    """A file's rows, of which there is at least one. Errors count them from 1, without the header."""

    path: Path
    content: pa.Table
    row_names: Sequence[str] = ()
    """What rows are called that have names."""
    notices: Sequence[str] = ()
    """What reading it found that a user may not expect."""

    @property
    def index_columns(self) -> tuple[str, ...]:
        """The columns that pandas wrote as the index of its table."""
        try:
            names = loads((self.content.schema.metadata or {})[b"pandas"])["index_columns"]
            return tuple(name for name in names if isinstance(name, str) and name in self.content.column_names)
        except (KeyError, TypeError, ValueError, RecursionError):  # not of pandas, or altered
            return ()

    def row_name(self, row: int) -> str:
        """Return what a row is called: by default its number, from 1. `row`: counted from 0."""
        return self.row_names[row] if self.row_names else str(row + 1)

    def check_column(self, name: str) -> None:
        """Raise StageError, with the nearest name, where there is not one such column."""
        names = self.content.column_names
        if name not in names:
            close = nearest(name, names)
            hint = f"did you mean {close!r}?" if close else f"it has {', '.join(names)}"
            if len(names) == 1 and ";" in names[0] and self.path.suffix.lower() == ".csv":
                hint = f"it has one, {names[0]!r}: .csv files separate columns by commas"
            elif not close and self._begins_with_a_row():
                hint += "; if its first line is a row, give their names in `column_names`"
            raise StageError(f"{self.path} has no column {name!r} ({hint})")
        if names.count(name) > 1:
            raise StageError(f"{self.path} has more than one column {name!r}")

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column. Raises StageError where there is not one such, or it holds bytes."""
        self.check_column(name)
        column = self.content.column(name)
        type_ = column.type.value_type if types.is_dictionary(column.type) else column.type
        if any(of(type_) for of in _IS_BINARY):
            raise StageError(f"{self.path} can't be read: column {name!r} is not UTF-8 text")
        return column

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
        if not allow_missing:
            self._refuse_missing(name, np.isnan(values_N), hint)
        for wrong_N, problem in (
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
        column = self._without_nan(name)
        if types.is_null(column.type):
            raise self.error(name, 0, "a missing value, as all are: remove the column")
        if types.is_nested(column.type):
            raise self.error(name, 0, "which is no text")
        if not allow_missing:
            self._refuse_missing(name, compute.is_null(column).to_numpy(), hint)
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
        missing_N: npt.NDArray[np.bool_] = compute.is_null(self._without_nan(name)).to_numpy()
        return missing_N

    def refuse_other_types(self, names: Sequence[str], hint: str) -> None:
        """Raise StageError that names them all where several of these columns hold neither numbers nor text.

        `hint`: what else to do about them than to turn them into numbers.
        """
        kinds = {
            "dates or times": (types.is_temporal,),
            "no values": (types.is_null,),
            "lists or objects": (types.is_nested,),
            "bytes": _IS_BINARY,
        }
        found = {
            name: kind
            for name in names
            for kind, of_kind in kinds.items()
            if any(of(self.content.column(name).type) for of in of_kind)
        }
        if len(found) > 1:  # of a single one the reader says more
            named = ", ".join(f"{name!r} has {kind}" for name, kind in found.items())
            remedy = f"turn them into numbers, or {hint}: {dumps([*found])}"
            raise StageError(f"{self.path}: columns that are no inputs as they are: {named}; {remedy}")

    def refuse_mistyped_numbers(self, name: str) -> None:
        """Raise StageError for a column of text that is mostly numbers, at the first value that is none."""
        texts = {row: text for row, text in enumerate(self.texts_or_none(name, allow_missing=True)) if text is not None}
        numbers = {text for text in set(texts.values()) if _is_number(text)}
        num_numbers = sum(text in numbers for text in texts.values())
        if len(texts) / 2 <= num_numbers < len(texts):
            row = next(row for row, text in texts.items() if text not in numbers)
            count = f"{len(texts) - num_numbers:,} of {len(texts):,} values are no numbers"
            remedy = "put it right, or name it in `categorical`; a missing value is left empty, with `missing: mean`"
            raise self.error(name, row, f"which is no number, as most are: {remedy} ({count})")

    def error(self, name: str, row: int, problem: str) -> StageError:
        """Return the error about a value. `row`: counted from 0."""
        value = self.content.column(name)[row].as_py()
        text = repr(value) if isinstance(value, str) else str(value)
        found = "" if value is None or value != value else f"{text}, "
        return StageError(f"{self.path}, row {self.row_name(row)}, column {name!r}: {found}{problem}")

    def _refuse_missing(self, name: str, missing_N: npt.NDArray[np.bool_], hint: str) -> None:
        """Raise StageError where a value is missing. `hint`: as for `numbers`."""
        if num := int(missing_N.sum()):
            count = f" ({num:,} of {len(missing_N):,} rows have none)" if num > 1 else ""
            raise self.error(name, int(missing_N.argmax()), f"a missing value; remove the row{hint}{count}")

    def _without_nan(self, name: str) -> pa.ChunkedArray:
        """Return a column with null in place of NaN."""
        column = self.column(name)
        if not types.is_floating(column.type):
            return column
        if types.is_float16(column.type):  # which few functions take
            column = compute.cast(column, pa.float32())
        return compute.if_else(compute.is_nan(column), pa.scalar(None, column.type), column)

    def _begins_with_a_row(self) -> bool:
        """Return whether the names of the columns look like values: a number, or what the column has further down."""
        if self.path.suffix.lower() not in paths.DELIMITERS:
            return False
        return any(
            _is_number(name) or (types.is_string(column.type) and compute.index(column, name).as_py() >= 0)
            for name, column in zip(self.content.column_names, self.content.columns, strict=True)
        )


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
    notice = None
    try:
        if file.suffix.lower() != ".parquet":
            paths.refuse_utf16(file)
        match file.suffix.lower():
            case ".parquet":
                content = parquet.read_table(file)
            case suffix if suffix in paths.JSON_SUFFIXES:
                content = _read_json(file, config, texts)
            case _:
                content = read_csv(file, config, texts, [field.name for field in schema or ()])
                notice = line_breaks(content) if config.quoting else None
        content.validate(full=True)
    except StageError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        row = row_of_another_length(file, config, text)
        place = f"{file}, {row}" if row else f"{file} can't be read: {text}"
        raise StageError(f"{place}{advice(file, config, text)}") from error
    if not len(content):
        raise StageError(f"{file} has no rows")
    return TableFile(file, content, notices=[f"{file}: {notice}"] if notice else [])


def _read_json(file: Path, config: TableFileConfig, texts: pa.Schema) -> pa.Table:
    # Numbers are no text in JSON, and are written in one way.
    texts = pa.schema([field for field in texts if not field.metadata])
    lines = _lines_of_array(file)

    def read(schema: pa.Schema | None) -> pa.Table:
        source = file if lines is None else pa.BufferReader(lines)
        return json.read_json(source, json.ReadOptions(block_size=BLOCK_BYTES), json.ParseOptions(schema))

    content = read(texts)  # without a schema, texts that look like times would be read as these
    times = [
        field.name for field in content.schema if types.is_temporal(field.type) and field.name in config.name_columns
    ]
    if times:
        texts = pa.schema([*texts, *(pa.field(name, pa.string()) for name in times)])
        content = read(texts)
    empty = [name for name in texts.names if content.column(name).null_count == len(content)]
    if empty:  # a schema adds the columns that the file does not have
        found = read(None).column_names
        content = content.drop_columns([name for name in empty if name not in found])
    for name in config.name_columns & {*content.column_names}:
        if types.is_floating(content.column(name).type):
            rounded_N = np.abs(content.column(name).to_numpy()) >= _EXACT
            if rounded_N.any():
                problem = "a number that is rounded, so that it may stand for several: write it as text"
                raise TableFile(file, content).error(name, int(rounded_N.argmax()), problem)
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


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return value is None
    return True
