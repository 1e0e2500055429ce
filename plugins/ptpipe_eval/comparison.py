"""The `Comparison` artifact: the table of models that gates judge and reports show. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from ptpipe import JSON, Artifact, IntegrityError, StageError, nearest

Threads: TypeAlias = Literal["one", "all"]
_FILE = "comparison.json"


def cell_label(batch_size: int, threads: Threads) -> str:
    """Return the name of a latency cell: `batch 32, all threads`."""
    return f"batch {batch_size}, {threads} thread{'' if threads == 'one' else 's'}"


@dataclass(frozen=True)
class Latency:
    """Wall time of one prediction over a number of runs on one machine."""

    batch_size: int
    threads: Threads
    num_threads: int
    """The number of threads that `threads` meant on the measuring machine."""
    p10_ms: float
    median_ms: float
    p90_ms: float
    num_runs: int
    waited_fraction: float | None = None
    """Fraction of the time that its threads waited for a busy processor; None if the system does not report it."""

    @property
    def label(self) -> str:
        """`batch 32, all threads`."""
        return cell_label(self.batch_size, self.threads)


@dataclass(frozen=True)
class Row:
    """Size, correct predictions and latencies of one model."""

    name: str
    """Its reference in the manifest."""
    format: str
    size_bytes: int
    num_correct: int
    latencies: tuple[Latency, ...] = ()

    def latency(self, batch_size: int, threads: Threads) -> Latency | None:
        """Return the measurement of a cell, or None."""
        return next((cell for cell in self.latencies if (cell.batch_size, cell.threads) == (batch_size, threads)), None)


@dataclass(frozen=True)
class Comparison(Artifact):
    """Size, accuracy and latency of several models, measured on the same samples and the same machine.

    `summary()` is the whole table, and the content of the file that `save` writes:

        {"data": str, "split": str, "num_samples": int, "baseline": str, "method": str, "measured_at": str,
         "rows": [{"name": str, "format": str, "size_bytes": int, "size_ratio": float,
                   "num_correct": int, "accuracy": float, "drop": float,
                   "latency": [{"batch_size": int, "threads": "one" | "all", "num_threads": int,
                                "p10_ms": float, "median_ms": float, "p90_ms": float, "num_runs": int,
                                "waited_fraction": float | None}, ...]}, ...]}

    Rows are in the order of the manifest. `accuracy` is a fraction of 1; `drop` is the baseline's accuracy minus the
    row's (negative if the row is better); `size_ratio` is the row's size over the baseline's. `measured_at` is ISO
    8601 in UTC; the machine is in the record of the stage.
    """

    data: str
    """The data set's name, which tells a fallback from the real data."""
    split: str
    num_samples: int
    baseline: str
    rows: tuple[Row, ...]
    method: str
    """How latency was measured."""
    measured_at: str

    def row(self, name: str) -> Row:
        """Return the row of that name. Raises StageError, suggesting the nearest name, if there is none."""
        names = [row.name for row in self.rows]
        if name in names:
            return self.rows[names.index(name)]
        guess = nearest(name, names)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise StageError(f"{name!r} is not in the comparison, which has {', '.join(names)}{hint}")

    def accuracy(self, row: Row) -> float:
        """Return the fraction of the samples that the row's model predicts correctly."""
        return row.num_correct / self.num_samples

    def save(self, folder: Path) -> None:
        """Write the table as JSON."""
        (folder / _FILE).write_text(json.dumps(self.summary(), indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the table; derived values (accuracy, drop, ratio) are recomputed. Raises IntegrityError if malformed."""
        try:
            content: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            rows = tuple(_row_from_json(row) for row in content.pop("rows"))
            return cls(rows=rows, **content)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{folder / _FILE} is not a comparison: {error!r}") from error

    def summary(self) -> dict[str, JSON]:
        """Return the whole table; see the class for its fields."""
        return {
            "data": self.data,
            "split": self.split,
            "num_samples": self.num_samples,
            "baseline": self.baseline,
            "method": self.method,
            "measured_at": self.measured_at,
            "rows": [self._row_as_json(row) for row in self.rows],
        }

    def _row_as_json(self, row: Row) -> dict[str, JSON]:
        baseline = self.row(self.baseline)
        return {
            "name": row.name,
            "format": row.format,
            "size_bytes": row.size_bytes,
            "size_ratio": row.size_bytes / baseline.size_bytes,
            "num_correct": row.num_correct,
            "accuracy": self.accuracy(row),
            "drop": (baseline.num_correct - row.num_correct) / self.num_samples,
            "latency": [asdict(cell) for cell in row.latencies],
        }


def _row_from_json(content: Mapping[str, Any]) -> Row:
    return Row(
        name=content["name"],
        format=content["format"],
        size_bytes=content["size_bytes"],
        num_correct=content["num_correct"],
        latencies=tuple(Latency(**cell) for cell in content["latency"]),
    )
