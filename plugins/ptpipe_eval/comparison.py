"""The `Comparison` artifact: the table of models that gates judge and reports show. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from ptpipe import JSON, Artifact, IntegrityError, StageError, nearest
from ptpipe_torch import Metric

if TYPE_CHECKING:
    from ptpipe_eval.quality.paired import Drop, PairedSamples

Threads: TypeAlias = Literal["one", "all"]
_FILE = "comparison.json"
SAMPLES_FILE = "samples.json"


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
    """Size, metrics and latencies of one model."""

    name: str
    """Its reference in the manifest."""
    format: str
    size_bytes: int
    metrics: Mapping[str, float]
    """Of the task, by name."""
    latencies: tuple[Latency, ...] = ()

    def latency(self, batch_size: int, threads: Threads) -> Latency | None:
        """Return the measurement of a cell, or None."""
        return next((cell for cell in self.latencies if (cell.batch_size, cell.threads) == (batch_size, threads)), None)


@dataclass(frozen=True)
class Comparison(Artifact):
    """Size, metrics and latency of several models, measured on the same samples and the same machine.

    `summary()` is the whole table, and the content of the file that `save` writes:

        {"data": str, "split": str, "num_samples": int,
         "metrics": [{"name": str, "higher_is_better": bool, "is_fraction": bool}, ...],
         "baseline": str, "method": str, "measured_at": str,
         "rows": [{"name": str, "format": str, "size_bytes": int, "size_ratio": float,
                   "accuracy": float, "drop": float, "drop_low": float, "drop_high": float, "num_flips": int,
                   "metrics": {"accuracy": float, "loss": float, ...},
                   "paired": {"accuracy": {"drop": float, "low": float, "high": float, "num_lost": int,
                                           "num_gained": int, "discordance": float, "mcnemar_mid_p": float},
                              "loss": {"drop": float, "low": float, "high": float}, ...},
                   "per_class": [{"name": str, "num_samples": int, "drop": float, "low": float, ...}, ...],
                   "latency": [{"batch_size": int, "threads": "one" | "all", "num_threads": int,
                                "p10_ms": float, "median_ms": float, "p90_ms": float, "num_runs": int,
                                "waited_fraction": float | None}, ...]}, ...]}

    Rows are in the order of the manifest. The first of `metrics` is the task's primary metric, here the accuracy of a
    classification. `drop` is by how much the row is worse in it than the baseline (negative if it is better); of a
    metric that is no fraction it is called `worse_by`. `size_ratio` is the row's size over the baseline's.
    Rows other than the baseline also have what comparing the models sample by sample shows: `drop_low` to `drop_high`,
    the interval of the drop at 95 %; `num_lost`, samples that are right in the baseline alone, `num_gained`, those that
    are right in the row alone, `discordance`, the fraction of both; `num_flips`, samples that the row predicts
    differently, right or wrong; and the 20 classes that lose most. No interval is corrected for their number.
    `measured_at` is ISO 8601 in UTC; the machine is in the record of the stage.
    """

    data: str
    """The data set's name, which tells a fallback from the real data."""
    split: str
    num_samples: int
    metrics: tuple[Metric, ...]
    """Of the task; the first one is the primary metric."""
    baseline: str
    rows: tuple[Row, ...]
    method: str
    """How latency was measured."""
    measured_at: str
    samples: PairedSamples | None = field(default=None, compare=False, repr=False)
    """What every model made of each sample; None: not known, and there are no intervals."""

    def drop(self, name: str, metric: Metric) -> Drop | None:
        """Return how much worse the row of that name is than the baseline; None where no interval is known."""
        row = self.rows.index(self.row(name))
        return None if self.samples is None else self.samples.drop(metric.name, row)

    def row(self, name: str) -> Row:
        """Return the row of that name. Raises StageError, suggesting the nearest name, if there is none."""
        names = [row.name for row in self.rows]
        if name in names:
            return self.rows[names.index(name)]
        guess = nearest(name, names)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise StageError(f"{name!r} is not in the comparison, which has {', '.join(names)}{hint}")

    def metric(self, name: str | None) -> Metric:
        """Return the metric of that name; None: the primary one. Raises StageError if there is none."""
        found = self.metrics[0] if name is None else next((own for own in self.metrics if own.name == name), None)
        if found is None:
            raise StageError(f"the comparison has no {name}, but {', '.join(own.name for own in self.metrics)}")
        return found

    def save(self, folder: Path) -> None:
        """Write the table as JSON, and what is known of each sample."""
        if self.samples is not None:
            from ptpipe_eval.quality.storage import save_samples

            save_samples(self.samples, folder)
        (folder / _FILE).write_text(json.dumps(self.summary(), indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the table; derived values (drop, ratio) are recomputed. Raises IntegrityError if malformed."""
        try:
            content: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            rows = tuple(_row_from_json(row) for row in content.pop("rows"))
            metrics = tuple(Metric(**metric) for metric in content.pop("metrics"))
            comparison = cls(rows=rows, metrics=metrics, **content)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{folder / _FILE} is not a comparison: {error!r}") from error
        return replace(comparison, samples=comparison._load_samples(folder))

    def _load_samples(self, folder: Path) -> PairedSamples | None:
        if not (folder / SAMPLES_FILE).exists():
            return None
        from ptpipe_eval.quality.storage import load_samples

        samples = load_samples(folder, len(self.rows), self.rows.index(self.row(self.baseline)))
        if len(samples.ids) != self.num_samples:
            raise IntegrityError(f"{folder}: {len(samples.ids)} samples of a comparison of {self.num_samples}")
        return samples

    def summary(self) -> dict[str, JSON]:
        """Return the whole table; see the class for its fields."""
        return {
            "data": self.data,
            "split": self.split,
            "num_samples": self.num_samples,
            "metrics": [asdict(metric) for metric in self.metrics],
            "baseline": self.baseline,
            "method": self.method,
            "measured_at": self.measured_at,
            "rows": [self._row_as_json(row) for row in self.rows],
        }

    def _row_as_json(self, row: Row) -> dict[str, JSON]:
        baseline, primary = self.row(self.baseline), self.metric(None)
        value = row.metrics[primary.name]
        bounds, paired = self._paired_as_json(row)
        return {
            "name": row.name,
            "format": row.format,
            "size_bytes": row.size_bytes,
            "size_ratio": row.size_bytes / baseline.size_bytes,
            primary.name: value,
            "drop" if primary.is_fraction else "worse_by": primary.drop(value, baseline.metrics[primary.name]),
            **bounds,
            "metrics": dict(row.metrics),
            "latency": [asdict(cell) for cell in row.latencies],
            **paired,
        }

    def _paired_as_json(self, row: Row) -> tuple[dict[str, JSON], dict[str, JSON]]:
        """Return the limits of the primary metric's drop, and all else that is known of the samples."""
        if self.samples is None or row.name == self.baseline:
            return {}, {}
        from ptpipe_eval.quality.summary import bounds_summary, paired_summary

        number = self.rows.index(row)
        return bounds_summary(self.samples, number, self.metrics[0]), paired_summary(self.samples, number, self.metrics)


def _row_from_json(content: Mapping[str, Any]) -> Row:
    return Row(
        name=content["name"],
        format=content["format"],
        size_bytes=content["size_bytes"],
        metrics=dict(content["metrics"]),
        latencies=tuple(Latency(**cell) for cell in content["latency"]),
    )
