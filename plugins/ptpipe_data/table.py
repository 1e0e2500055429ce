"""Tables in CSV, TSV and Parquet files, one row a sample.

Shape legend: N rows, F numeric columns, D categorical columns, T targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.classes import classification
from ptpipe_data.config import ClassesConfig
from ptpipe_data.paths import id_prefixes
from ptpipe_data.splitting import draw_missing_splits
from ptpipe_data.table_columns import CategoriesInfo, NumbersInfo
from ptpipe_data.table_file import TableFile, is_text, read_table
from ptpipe_data.tasks import mean_and_std, regression
from ptpipe_torch import (
    ArrayColumn,
    ColumnInfo,
    Data,
    DatasetInfo,
    MultiLabel,
    Split,
    Task,
)

if TYPE_CHECKING:
    from ptpipe_data.config import TableConfig

Values: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""A column's values in each file, by the file's split: that of train holds all splits without a file of their own."""

_ROW = "row"
_NUMBERS, _CATEGORIES, _LABELS, _TARGETS = "numbers", "categories", "labels", "targets"
_TEST_FRACTION = 0.2
_MAX_CLASSES = 1000
"""Of a target: more different values are numbers that were taken for classes."""


def load_table(config: TableConfig, seed: int) -> Data:
    """Return the data set. Statistics, categories and classes are those of train alone."""
    files: dict[str, TableFile] = {}
    for name, path in config.paths.items():
        files[name] = read_table(path, files["train"].content.schema if files else None)
    numeric, categorical = choose_features(config, files["train"])
    rows = _rows(files)
    drawn = draw_missing_splits(rows, config, seed, test_fraction=_TEST_FRACTION)
    reader = _Reader(config, files, drawn["train"].targets[_ROW].values())
    columns = {}
    if numeric:
        columns[_NUMBERS] = reader.numbers(numeric)
    if categorical:
        columns[_CATEGORIES] = reader.categories(categorical)
    task, target = reader.task()
    info = DatasetInfo(files["train"].path.stem, {name: column for name, (column, _) in columns.items()}, task)
    splits = {}
    for name, split in drawn.items():
        source = config.calibration_from if name == "calibration" else name
        source, rows_N = source if source in files else "train", split.targets[_ROW].values()
        inputs = {column: ArrayColumn(values[source][rows_N]) for column, (_, values) in columns.items()}
        (target_name,) = task.targets
        splits[name] = Split(split.ids, inputs, {target_name: ArrayColumn(target[source][rows_N])})
    return Data(info, splits, config.loader_options())


def choose_features(config: TableConfig, file: TableFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the numeric and the categorical input columns: text and booleans are categories."""
    names = config.features or tuple(name for name in file.content.column_names if name not in config.targets)
    for name in (*names, *config.targets, *config.categorical):
        file.column(name)
    for name in config.categorical:
        if name not in names:
            raise StageError(f"{file.path}: the categorical column {name!r} is not among the features")
    if not names:
        raise StageError(f"{file.path} has no column beside {', '.join(config.targets)}: nothing to learn from")
    text = {name for name in names if is_text(file.column(name).type)} | set(config.categorical)
    for name in names:
        if name in text and name not in config.categorical:
            file.refuse_mistyped_numbers(name)
    return tuple(name for name in names if name not in text), tuple(name for name in names if name in text)


def _rows(files: Mapping[str, TableFile]) -> dict[str, Split]:
    """Return splits whose only column is the number of the row: splits are drawn before any value is looked at."""
    prefixes = id_prefixes({split: file.path for split, file in files.items()})
    rows = {}
    for split, file in files.items():
        numbers_N = np.arange(len(file.content))
        ids = np.array([f"{prefixes[split]}/{number + 1}" for number in numbers_N.tolist()])
        rows[split] = Split(ids, {}, {_ROW: ArrayColumn(numbers_N)})
    return rows


@dataclass(frozen=True)
class _Reader:
    """Makes columns of files."""

    config: TableConfig
    files: Mapping[str, TableFile]
    train_N: npt.NDArray[np.int64]
    """Rows of the first file that train has."""

    def numbers(self, names: Sequence[str]) -> tuple[ColumnInfo, Values]:
        """Return the numeric columns, standardized in float64, float32 (N, F)."""
        fills = self.config.missing == "mean"
        columns, mean_F, std_F = self._measured(names, "" if fills else ", or set `missing` to mean", fills=fills)
        standardized = {split: ((of - mean_F) / std_F).astype(np.float32) for split, of in columns.items()}
        return NumbersInfo(names=tuple(names), mean=tuple(mean_F.tolist()), std=tuple(std_F.tolist())), standardized

    def categories(self, names: Sequence[str]) -> tuple[ColumnInfo, Values]:
        """Return the categorical columns, int64 (N, D)."""
        known, columns = [], []
        for name in names:
            texts = {split: file.texts(name) for split, file in self.files.items()}
            known.append(self._train_values(name, texts))
            numbers = {value: place for place, value in enumerate(known[-1], start=1)}
            columns.append({split: [numbers.get(value, 0) for value in of] for split, of in texts.items()})
        values = {split: np.array([of[split] for of in columns], dtype=np.int64).T.copy() for split in self.files}
        return CategoriesInfo(names=tuple(names), categories=tuple(known)), values

    def task(self) -> tuple[Task, Values]:
        """Return the task and the values of its target."""
        makers: Mapping[str, Callable[[], tuple[Task, Values]]] = {
            "classification": self._classification,
            "multi_label": self._multi_label,
            "regression": self._regression,
        }
        return makers[self.config.task]()

    def _classification(self) -> tuple[Task, Values]:
        (name,) = self.config.targets
        texts = {split: file.texts(name) for split, file in self.files.items()}
        classes = self._train_values(name, texts)
        if len(classes) > _MAX_CLASSES:
            path = self.files["train"].path
            raise StageError(f"{path}: {name!r} has {len(classes)} different values; is the task a regression?")
        numbers = {value: number for number, value in enumerate(classes)}
        for split, of in texts.items():
            if unseen := set(of) - numbers.keys():
                row = next(row for row, value in enumerate(of) if value in unseen)
                problem = "a class that no row of train has: remove the row, or add some"
                raise self.files[split].error(name, row, problem)
        labels = {split: np.array([numbers[value] for value in of], dtype=np.int64) for split, of in texts.items()}
        return classification(classes, self.config.classes or ClassesConfig(), labels["train"][self.train_N]), labels

    def _multi_label(self) -> tuple[Task, Values]:
        names = self.config.targets
        labels = {split: np.stack([file.flags(name) for name in names], axis=1) for split, file in self.files.items()}
        return MultiLabel(label_names=names), labels

    def _regression(self) -> tuple[Task, Values]:
        columns, *_ = self._measured(self.config.targets, "", fills=False)
        task = regression(self.config.targets, self.config, columns["train"][self.train_N])
        return task, {split: of.astype(np.float32) for split, of in columns.items()}

    def _measured(
        self, names: Sequence[str], hint: str, *, fills: bool
    ) -> tuple[dict[str, npt.NDArray[np.float64]], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return float64 (N, len(names)), and mean and standard deviation over train; that of a constant is 1.

        `fills`: missing values become the mean. `hint`: what else to do about them.
        """
        columns = {
            split: np.stack([file.numbers(name, hint, allow_missing=fills) for name in names], axis=1)
            for split, file in self.files.items()
        }
        mean, std = mean_and_std(columns["train"][self.train_N])
        return {split: np.where(np.isnan(of), mean, of) for split, of in columns.items()}, mean, std

    def _train_values(self, name: str, texts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Return the different values of train, sorted: numbers by size."""
        values = {texts["train"][row] for row in self.train_N.tolist()}
        is_number = not is_text(self.files["train"].column(name).type)
        return tuple(sorted(values, key=(lambda value: (float(value), value)) if is_number else None))
