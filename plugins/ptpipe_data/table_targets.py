"""Targets of data sets in tables, and what else is read of several files at once.

Shape legend: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_data.classes import classification, refuse_single_class
from ptpipe_data.config import ClassesConfig, TaskConfig
from ptpipe_data.paths import id_prefixes
from ptpipe_data.splitting import Groups, draw_missing_splits
from ptpipe_data.table_config import TableFileConfig
from ptpipe_data.table_file import TableFile, is_text
from ptpipe_data.tasks import regression
from ptpipe_torch import ArrayColumn, MultiLabel, Split, Task

Values: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""A column's values in each file, by the file's split: that of train holds all splits without a file of their own."""

_ROW = "row"
_TEST_FRACTION = 0.2
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MAX_CLASSES = 1000
"""Of a target: more different values are numbers that were taken for classes."""


def row_splits(files: Mapping[str, TableFile], written: Mapping[str, str]) -> dict[str, Split]:
    """Return splits whose only column is the number of the row: splits are drawn before any value is looked at.

    `written`: the paths of the files as they are written in a manifest.
    """
    prefixes = id_prefixes({split: file.path for split, file in files.items()}, written)
    rows = {}
    for split, file in files.items():
        numbers_N = np.arange(len(file.content))
        ids = np.array([f"{prefixes[split]}/{file.row_name(number)}" for number in numbers_N.tolist()])
        rows[split] = Split(ids, {}, {_ROW: ArrayColumn(numbers_N)})
    return rows


def draw_rows(files: Mapping[str, TableFile], config: TableFileConfig, seed: int) -> dict[str, Split]:
    """Return the `row_splits`, and those without a file drawn from train, in whole groups. `seed`: the manifest's."""
    rows, groups = row_splits(files, config.paths), row_groups(files, config.group)
    return draw_missing_splits(rows, config, seed, test_fraction=_TEST_FRACTION, groups=groups)


def rows_of(split: Split) -> npt.NDArray[np.int64]:
    """Return the rows, (N,), of one of the `row_splits`."""
    return split.targets[_ROW].values()


def row_groups(files: Mapping[str, TableFile], name: str | None) -> Groups | None:
    """Return what numbers the groups of rows, by the values of the column `name`; None where there is no such option.

    Raises StageError where a group has rows in two files.
    """
    if name is None:
        return None
    texts = {split: file.texts(name) for split, file in files.items()}
    for split, other in combinations(files, 2):
        values = {*texts[split]}
        if (row := next((row for row, value in enumerate(texts[other]) if value in values), None)) is not None:
            raise files[other].error(name, row, f"a group of which {files[split].path} has rows, too")
    numbers = {value: number for number, value in enumerate(sorted({*texts["train"]}))}
    groups_N = np.array([numbers[value] for value in texts["train"]], dtype=np.int64)
    return lambda rows: groups_N[rows_of(rows)]


def source_of(split: str, config: TaskConfig, files: Mapping[str, TableFile]) -> str:
    """Return the split whose file has the rows of this one."""
    source = config.calibration_from if split == "calibration" else split
    return source if source in files else "train"


@dataclass(frozen=True)
class TableReader:
    """Reads columns of all files; what is measured or counted is that of train alone."""

    files: Mapping[str, TableFile]
    train_N: npt.NDArray[np.int64]
    """Rows of the first file that train has."""

    def task(self, config: TaskConfig, targets: Sequence[str]) -> tuple[Task, Values]:
        """Return a task whose targets are columns, one value a row, and the targets' values."""
        match config.task:
            case "classification":
                return self._classification(config, targets[0])
            case "multi_label":
                labels = {split: self._flags(file, targets) for split, file in self.files.items()}
                return MultiLabel(label_names=tuple(targets)), labels
        columns = self.numbers(targets)
        task = regression(targets, config, columns["train"][self.train_N])
        return task, {split: of.astype(np.float32) for split, of in columns.items()}

    def numbers(
        self, names: Sequence[str], hint: str = "", *, allow_missing: bool = False
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Return float64 (N, len(names)), with NaN for missing values. `hint`: what else to do about them."""
        return {
            split: np.stack([file.numbers(name, hint, allow_missing=allow_missing) for name in names], axis=1)
            for split, file in self.files.items()
        }

    def train_values(self, name: str, texts: Mapping[str, Sequence[str | None]]) -> tuple[str, ...]:
        """Return the different values of train, sorted: numbers by size."""
        values = {value for row in self.train_N.tolist() if (value := texts["train"][row]) is not None}
        field = self.files["train"].content.schema.field(name)
        is_number = (field.metadata or not is_text(field.type)) and all(map(_NUMBER.fullmatch, values))
        return tuple(sorted(values, key=(lambda value: (float(value), value)) if is_number else None))

    def _classification(self, config: TaskConfig, name: str) -> tuple[Task, Values]:
        texts = {split: file.texts(name) for split, file in self.files.items()}
        classes = self.train_values(name, texts)
        if len(classes) > _MAX_CLASSES:
            path = self.files["train"].path
            raise StageError(f"{path}: {name!r} has {len(classes)} different values; is the task a regression?")
        numbers = {value: number for number, value in enumerate(classes)}
        for split, of in texts.items():
            if unseen := set(of) - numbers.keys():
                row = next(row for row, value in enumerate(of) if value in unseen)
                are_measured = all(map(_NUMBER.fullmatch, classes)) and any("." in value for value in classes)
                remedy = "is the task a regression?" if are_measured else "remove the row, or add some"
                raise self.files[split].error(name, row, f"a class that no row of train has: {remedy}")
        refuse_single_class(f"{self.files['train'].path}, column {name!r}: train", classes)
        labels = {split: np.array([numbers[value] for value in of], dtype=np.int64) for split, of in texts.items()}
        return classification(classes, config.classes or ClassesConfig(), labels["train"][self.train_N]), labels

    def _flags(self, file: TableFile, names: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.stack([file.flags(name) for name in names], axis=1)
