"""The table of artifacts that the gates read and the reports draw. Imports neither torch nor numpy."""

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
    """What a latency cell is called: `batch 32, all threads`."""
    return f"batch {batch_size}, {threads} thread{'' if threads == 'one' else 's'}"


@dataclass(frozen=True)
class Latency:
    """How long one prediction took, over a number of runs on one machine."""

    batch_size: int
    threads: Threads
    num_threads: int
    """What `threads` came to on the machine that measured."""
    p10_ms: float
    median_ms: float
    p90_ms: float
    num_runs: int
    waited_share: float | None = None
    """Share of the time that its threads waited for a processor on which something else ran; None: nobody knows."""

    @property
    def label(self) -> str:
        """`batch 32, all threads`."""
        return cell_label(self.batch_size, self.threads)


@dataclass(frozen=True)
class Row:
    """One artifact's size, correct answers and latencies."""

    name: str
    """Its reference in the manifest."""
    format: str
    size_bytes: int
    num_correct: int
    latencies: tuple[Latency, ...] = ()

    def latency(self, batch_size: int, threads: Threads) -> Latency | None:
        """The measurement of that cell, None where there is none."""
        return next((cell for cell in self.latencies if (cell.batch_size, cell.threads) == (batch_size, threads)), None)


@dataclass(frozen=True)
class Comparison(Artifact):
    """Artifacts side by side: size, accuracy and latency, each on the same samples and the same machine.

    `summary()` is the whole table, and the file that `save` writes:

        {"data": str, "split": str, "num_samples": int, "baseline": str, "method": str, "measured_at": str,
         "rows": [{"name": str, "format": str, "size_bytes": int, "size_share": float,
                   "num_correct": int, "accuracy": float, "drop": float,
                   "latency": [{"batch_size": int, "threads": "one" | "all", "num_threads": int,
                                "p10_ms": float, "median_ms": float, "p90_ms": float, "num_runs": int,
                                "waited_share": float | None}, ...]}, ...]}

    Rows stand in the order of the manifest. `accuracy` is a share of 1; `drop` is the baseline's accuracy less the
    row's (negative: the row is better); `size_share` is the row's size over the baseline's. `measured_at` is ISO 8601
    in UTC; the machine is in the record of the stage.
    """

    data: str
    """The data set's name, which says so where a stand-in was used."""
    split: str
    num_samples: int
    baseline: str
    rows: tuple[Row, ...]
    method: str
    """How latency was measured, in words."""
    measured_at: str

    def row(self, name: str) -> Row:
        """The row of that name. Raises StageError, with the nearest name, where there is none."""
        names = [row.name for row in self.rows]
        if name in names:
            return self.rows[names.index(name)]
        guess = nearest(name, names)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise StageError(f"{name!r} is not in the comparison, which has {', '.join(names)}{hint}")

    def accuracy(self, row: Row) -> float:
        """Share of the samples that it got right."""
        return row.num_correct / self.num_samples

    def save(self, folder: Path) -> None:
        """Write the table as JSON."""
        (folder / _FILE).write_text(json.dumps(self.summary(), indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the table; what follows from other figures in it is worked out anew."""
        try:
            content: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            rows = tuple(_row_from_json(row) for row in content.pop("rows"))
            return cls(rows=rows, **content)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{folder / _FILE} is not a comparison: {error!r}") from error

    def summary(self) -> dict[str, JSON]:
        """The whole table; the class says what is in it."""
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
            "size_share": row.size_bytes / baseline.size_bytes,
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
