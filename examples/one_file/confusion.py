"""A table that `ptpipe get` copies, in one file: `my.confusion`, which class is taken for which."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ptpipe import Artifact, Context, StageConfig, StageError, stage
from ptpipe_torch import Predictions


@dataclass(frozen=True)
class Table(Artifact):
    """Rows of a CSV file."""

    rows: list[list[str]]

    def save(self, folder: Path) -> None:
        """Write the file."""
        with (folder / "confusion.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(self.rows)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read it back."""
        with (folder / "confusion.csv").open(encoding="utf-8", newline="") as file:
            return cls(list(csv.reader(file)))

    @classmethod
    def deliverables(cls, folder: Path) -> Iterable[str]:
        """Name what `ptpipe get` copies."""
        return ["confusion.csv"]


@stage("my.confusion")
def confusion(config: StageConfig, ctx: Context, predictions: Predictions) -> Table:
    """Count how often each class is predicted for each label."""
    names, counts_KK = (predictions.metrics.get(name) for name in ("class_names", "confusion"))
    if not (isinstance(names, list) and isinstance(counts_KK, list)):
        raise StageError("my.confusion needs the predictions of a classification")
    rows = [[str(name), *map(str, counts_K)] for name, counts_K in zip(names, counts_KK, strict=True)]
    return Table([["label", *map(str, names)], *rows])
