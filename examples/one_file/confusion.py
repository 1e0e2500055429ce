"""A table that `ptpipe get` copies, in one file: `my.confusion`, which class is taken for which."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
    metrics: Mapping[str, Any] = predictions.metrics
    if "confusion" not in metrics:
        raise StageError("my.confusion needs the predictions of a classification")
    names, counts_KK = metrics["class_names"], metrics["confusion"]
    rows = [[name, *map(str, counts_K)] for name, counts_K in zip(names, counts_KK, strict=True)]
    return Table([["label", *names], *rows])
