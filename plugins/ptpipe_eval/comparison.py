"""The `Comparison` artifact: the table of models that gates judge and reports show. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, Artifact, IntegrityError, StageError, nearest
from ptpipe_eval.graph.facts import Costs, Peaks
from ptpipe_eval.latency.latencies import Latency, StartUp, Threads
from ptpipe_torch import Metric

if TYPE_CHECKING:
    from ptpipe_eval.quality.details import Details
    from ptpipe_eval.quality.paired import Drop, PairedSamples
    from ptpipe_eval.quality.trivial import TrivialAnswer

_FILE = "comparison.json"
SAMPLES_FILE = "samples.json"


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
    start_up: StartUp | None = None
    """None where no latency was measured."""
    costs: Costs | None = None
    """None where they were not counted."""

    def latency(self, batch_size: int, threads: Threads, length: int | None = None) -> Latency | None:
        """Return the measurement of a cell, or None."""
        wanted = (batch_size, threads, length)
        return next((cell for cell in self.latencies if (cell.batch_size, cell.threads, cell.length) == wanted), None)


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
                   "latency": [{"batch_size": int, "threads": "one" | "all", "median_ms": float, ...}, ...],
                   "start_up": {"load_ms": float, "first_call_ms": float, "peak_memory_bytes": int},
                   "compressed_bytes": int, "macs": int, "costs": {"operators": {...}, ...}}, ...],
         "peaks": [{"num_threads": int, "macs_per_s": {...}, "bytes_per_s": {...}}, ...],
         "trivial_answer": {"answer": str, "value": float, "no_better": [str, ...]}}

    Rows are in the order of the manifest. The first of `metrics` is the task's primary metric, here the accuracy of a
    classification. `drop` is by how much the row is worse in it than the baseline (negative if it is better); of a
    metric that is no fraction it is called `worse_by`. `size_ratio` is the row's size over the baseline's. A latency
    has the fields of `Latency`, `costs` those of `Costs`; `peaks` is what the machine can do with a number of threads.
    Rows other than the baseline also have what comparing the models sample by sample shows: `drop_low` to `drop_high`,
    the interval of the drop at 95 %; `num_lost`, samples that are right in the baseline alone, `num_gained`, those that
    are right in the row alone, `discordance`, the fraction of both; `num_flips`, samples that the row predicts
    differently, right or wrong; and the 20 classes that lose most. No interval is corrected for their number.
    `trivial_answer` is the best one that looks at no input (always the most frequent class), with its primary metric
    and the rows that are no better; it is missing where it isn't known.
    `measured_at` is ISO 8601 in UTC; the machine is in the record of the stage.
    """

    data: str
    """The data set's name, which tells a fallback from the real data."""
    split: str
    num_samples: int
    metrics: tuple[Metric, ...]
    """Of the task; the first one is the primary metric. None where only latency was measured."""
    baseline: str
    rows: tuple[Row, ...]
    method: str
    """How latency was measured."""
    measured_at: str
    samples: PairedSamples | None = field(default=None, compare=False, repr=False)
    """What every model made of each sample; None: not known, and there are no intervals."""
    peaks: tuple[Peaks, ...] = ()
    """Of the machine, for each number of threads that latency was measured with."""
    details: Details | None = field(default=None, compare=False, repr=False)
    """What reports show of each model beside its figures; None: not known."""
    trivial_answer: TrivialAnswer | None = None
    """The best answer that looks at no input; None: not known."""

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
        found = next((own for own in self.metrics if name in (None, own.name)), None)
        if found is None:
            others = ", ".join(own.name for own in self.metrics) or "latency and size alone"
            raise StageError(f"the comparison has no {name or 'metric'}, but {others}")
        return found

    def save(self, folder: Path) -> None:
        """Write the table as JSON, and what is known of each sample."""
        if self.samples is not None:
            from ptpipe_eval.quality.storage import save_samples

            save_samples(self.samples, folder)
        if self.details is not None:
            self.details.save(folder)
        (folder / _FILE).write_text(json.dumps(self.summary(), indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the table; derived values (drop, ratio) are recomputed. Raises IntegrityError if malformed."""
        try:
            content: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            rows = tuple(_row_from_json(row) for row in content.pop("rows"))
            metrics = tuple(Metric(**metric) for metric in content.pop("metrics"))
            peaks = tuple(map(Peaks.from_json, content.pop("peaks", ())))
            trivial = _trivial_from_json(content.pop("trivial_answer", None))
            comparison = cls(rows=rows, metrics=metrics, peaks=peaks, trivial_answer=trivial, **content)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{folder / _FILE} is not a comparison: {error!r}") from error
        return replace(comparison, samples=comparison._load_samples(folder), details=comparison._load_details(folder))

    def _load_samples(self, folder: Path) -> PairedSamples | None:
        if not (folder / SAMPLES_FILE).exists():
            return None
        from ptpipe_eval.quality.storage import load_samples

        samples = load_samples(folder, len(self.rows), self.rows.index(self.row(self.baseline)))
        if len(samples.ids) != self.num_samples:
            raise IntegrityError(f"{folder}: {len(samples.ids)} samples of a comparison of {self.num_samples}")
        return samples

    def _load_details(self, folder: Path) -> Details | None:
        from ptpipe_eval.quality.details import Details

        return Details.load(folder, len(self.rows), self.num_samples)

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
            "peaks": [asdict(own) for own in self.peaks],
            **self._trivial_as_json(),
        }

    def _trivial_as_json(self) -> dict[str, JSON]:
        if self.trivial_answer is None:
            return {}
        return {"trivial_answer": self.trivial_answer.to_json(self.metrics[0], self.rows)}

    def _row_as_json(self, row: Row) -> dict[str, JSON]:
        baseline = self.row(self.baseline)
        return {
            "name": row.name,
            "format": row.format,
            "size_bytes": row.size_bytes,
            "size_ratio": row.size_bytes / baseline.size_bytes,
            **self._quality_as_json(row, baseline),
            "metrics": dict(row.metrics),
            "latency": [_latency_as_json(cell) for cell in row.latencies],
            "start_up": asdict(row.start_up) if row.start_up else {},
            **_costs_as_json(row.costs),
        }

    def _quality_as_json(self, row: Row, baseline: Row) -> dict[str, JSON]:
        if not self.metrics:
            return {}
        primary = self.metrics[0]
        value = row.metrics[primary.name]
        drop = primary.drop(value, baseline.metrics[primary.name])
        own = {primary.name: value, primary.drop_name: drop}
        return own | self._paired_as_json(row)

    def _paired_as_json(self, row: Row) -> dict[str, JSON]:
        """Return the limits of the primary metric's drop, and all else that is known of the samples."""
        if self.samples is None or row.name == self.baseline:
            return {}
        from ptpipe_eval.quality.summary import bounds_summary, paired_summary

        number = self.rows.index(row)
        bounds = bounds_summary(self.samples, number, self.metrics[0])
        return bounds | paired_summary(self.samples, number, self.metrics)


def _latency_as_json(cell: Latency) -> dict[str, JSON]:
    return {**asdict(cell), "round_ratios": list(cell.round_ratios)}


def _costs_as_json(costs: Costs | None) -> dict[str, JSON]:
    if costs is None:
        return {}
    return {"compressed_bytes": costs.compressed_bytes, "macs": costs.macs, "costs": costs.to_json()}


def _trivial_from_json(content: Mapping[str, Any] | None) -> TrivialAnswer | None:
    if content is None:
        return None
    from ptpipe_eval.quality.trivial import TrivialAnswer

    return TrivialAnswer(content["answer"], content["value"])


def _row_from_json(content: Mapping[str, Any]) -> Row:
    return Row(
        name=content["name"],
        format=content["format"],
        size_bytes=content["size_bytes"],
        metrics=dict(content["metrics"]),
        latencies=tuple(map(Latency.from_json, content["latency"])),
        start_up=StartUp(**content["start_up"]) if content["start_up"] else None,
        costs=Costs.from_json(content["costs"]) if "costs" in content else None,
    )
