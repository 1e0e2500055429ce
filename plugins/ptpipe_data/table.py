"""Tables in CSV, TSV and Parquet files, one row a sample.

Shape legend: N rows, F numeric columns, D categorical columns, T targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.duplicates import report_shared
from ptpipe_data.paths import dataset_name
from ptpipe_data.table_columns import CategoriesInfo, NumbersInfo
from ptpipe_data.table_file import TableFile, is_text, read_files
from ptpipe_data.table_targets import TableReader, Values, draw_rows, rows_of, source_of
from ptpipe_data.tasks import mean_and_std
from ptpipe_torch import ArrayColumn, ColumnInfo, Data, DatasetInfo, Split

if TYPE_CHECKING:
    from ptpipe import Context
    from ptpipe_data.table_config import TableConfig

_NUMBERS, _CATEGORIES = "numbers", "categories"
_MISSING_HINT = ", or set `missing` to mean"
_MIN_NUMBERED_ROWS = 10
"""The values of fewer may well be consecutive."""


def load_table(config: TableConfig, ctx: Context) -> Data:
    """Return the data set. Statistics, categories and classes are those of train alone.

    Gives notices of columns that look like no features.
    """
    files = read_files(config)
    numeric, categorical = choose_features(config, files["train"])
    for notice in (*(text for file in files.values() for text in file.notices), *_unused_index(config, files["train"])):
        ctx.notice(notice)
    drawn = draw_rows(files, config, ctx.seed)
    reader = TableReader(files, rows_of(drawn["train"]))
    columns, fills = {}, config.missing == "mean"
    if numeric:
        columns[_NUMBERS] = _numbers(reader, numeric, fills=fills)
    if categorical:
        columns[_CATEGORIES] = _categories(reader, categorical, fills=fills)
    task, target = reader.task(config, config.targets)
    info = DatasetInfo(dataset_name(files["train"].path), {name: column for name, (column, _) in columns.items()}, task)
    splits = {}
    for name, split in drawn.items():
        source, rows_N = source_of(name, config, files), rows_of(split)
        inputs = {column: ArrayColumn(values[source][rows_N]) for column, (_, values) in columns.items()}
        (target_name,) = task.targets
        splits[name] = Split(split.ids, inputs, {target_name: ArrayColumn(target[source][rows_N])})
    judged = next((name for name in ("test", "val") if len(splits[name])), "train")
    file, rows_N = files[source_of(judged, config, files)], rows_of(drawn[judged])
    unknown = _unknown_categories(splits[judged], categorical, file, rows_N)
    for problem in (*_row_numbers(files["train"], numeric), *(f"{of} of {judged}" for of in unknown)):
        ctx.notice(f"{files['train'].path}: {problem}: leave it out with `exclude`")
    report_shared(splits, ctx, may_repeat=not any(_has_fractions(files["train"], name) for name in numeric))
    return Data(info, splits, config.loader_options())


def choose_features(config: TableConfig, file: TableFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the numeric and the categorical input columns: text and booleans are categories."""
    index = {*file.index_columns} - {*config.categorical}
    others = {*config.targets, *config.exclude, *index, config.group}
    names = config.features or tuple(name for name in file.content.column_names if name not in others)
    for name in (*names, *config.targets, *config.categorical, *config.exclude):
        file.check_column(name)
    for name in config.categorical:
        if name not in names:
            raise StageError(f"{file.path}: the categorical column {name!r} is not among the features")
    if not names:
        named = ", ".join((*config.targets, *config.exclude))
        raise StageError(f"{file.path} has no column beside {named}: nothing to learn from")
    option = "leave them out of `features`" if config.features else "name them in `exclude`"
    file.refuse_other_types([name for name in names if name not in config.categorical], option)
    text = {name for name in names if is_text(file.column(name).type)} | set(config.categorical)
    for name in names:
        if name in text and name not in config.categorical:
            file.refuse_mistyped_numbers(name)
    return tuple(name for name in names if name not in text), tuple(name for name in names if name in text)


def _numbers(reader: TableReader, names: Sequence[str], *, fills: bool) -> tuple[ColumnInfo, Values]:
    """Return the numeric columns, standardized in float64, float32 (N, F); `fills`: with their mean where missing."""
    columns = reader.numbers(names, _MISSING_HINT, allow_missing=fills)
    mean_F, std_F = mean_and_std(columns["train"][reader.train_N])
    filled = {split: np.where(np.isnan(of), mean_F, of) for split, of in columns.items()}
    standardized = {split: ((of - mean_F) / std_F).astype(np.float32) for split, of in filled.items()}
    return NumbersInfo(names=tuple(names), mean=tuple(mean_F.tolist()), std=tuple(std_F.tolist())), standardized


def _categories(reader: TableReader, names: Sequence[str], *, fills: bool) -> tuple[ColumnInfo, Values]:
    """Return the categorical columns, int64 (N, D); `fills`: with 0 for a missing value."""
    known, columns = [], []
    for name in names:
        texts = {
            split: file.texts_or_none(name, _MISSING_HINT, allow_missing=fills) for split, file in reader.files.items()
        }
        known.append(reader.train_values(name, texts))
        numbers: dict[str | None, int] = {value: place for place, value in enumerate(known[-1], start=1)}
        columns.append({split: [numbers.get(value, 0) for value in of] for split, of in texts.items()})
    values = {split: np.array([of[split] for of in columns], dtype=np.int64).T.copy() for split in reader.files}
    return CategoriesInfo(names=tuple(names), categories=tuple(known)), values


def _has_fractions(file: TableFile, name: str) -> bool:
    return bool((file.numbers(name, allow_missing=True) % 1 > 0).any())


def _unused_index(config: TableConfig, file: TableFile) -> Iterator[str]:
    """Yield what to say about each column that is the index of a pandas table, and no input for that reason alone."""
    for name in file.index_columns:
        if not config.features and name not in (*config.targets, *config.exclude, *config.categorical, config.group):
            yield (
                f"{file.path}: column {name!r} is the index of a pandas table, and no input: for one, name it in "
                "`categorical`, or all inputs in `features`"
            )


def _row_numbers(file: TableFile, names: Sequence[str]) -> Iterator[str]:
    """Yield the problem of each column that numbers the rows, such as the index that pandas writes into a CSV file."""
    first = replace(file, content=file.content.slice(0, _MIN_NUMBERED_ROWS))  # few columns need more than a look
    if len(first.content) < _MIN_NUMBERED_ROWS:
        return
    for name in names:
        if all((np.diff(part.numbers(name, allow_missing=True)) == 1).all() for part in (first, file)):
            yield f"column {name!r} numbers the rows, so that a network can learn their order"


def _unknown_categories(
    split: Split, names: Sequence[str], file: TableFile, rows_N: npt.NDArray[np.int64]
) -> Iterator[str]:
    """Yield the problem of each column whose values, but for missing ones, are new in most rows of a split.

    `file`, `rows_N`: where the split's rows lie.
    """
    for number, name in enumerate(names):
        values_N = split.inputs[_CATEGORIES].values()[~file.is_missing(name)[rows_N], number]
        unknown = int((values_N == 0).sum())
        if 2 * unknown > len(values_N):
            yield f"column {name!r} has values that train does not have in {unknown:,} of {len(values_N):,} rows"
