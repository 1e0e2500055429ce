"""A reporter in one file: writes `metrics.csv` into the folder of every run."""

from __future__ import annotations

import csv
from collections.abc import Iterable

from ptpipe import Reporter, RunFinished, hookimpl


class MetricsCsv(Reporter):
    """Write every number that a stage reported as a row: stage, metric, value."""

    def run_finished(self, event: RunFinished) -> None:
        """Write the file, also for a run that failed or was interrupted."""
        metrics = ((stage.stage_id, *item) for stage in event.stages for item in stage.metrics.items())
        with (event.folder / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(("stage", "metric", "value"))
            table.writerows(row for row in metrics if isinstance(row[2], int | float))


@hookimpl
def ptpipe_reporters() -> Iterable[Reporter]:
    """Provide a new reporter for this run."""
    return [MetricsCsv()]
