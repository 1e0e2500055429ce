"""Record a run in MLflow: where `MLFLOW_TRACKING_URI` says, else in MLflow's own local store, `mlflow.db`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import Event, ExitCode, Progress, Reporter, RunFinished, RunStarted, StageFinished
from ptpipe.launching import exclusive_lock
from ptpipe_report import run_summary
from ptpipe_report.trackers.curves import Curves, Point
from ptpipe_report.trackers.text import comparisons, options

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""In names; of what is left, MLflow takes letters of any language."""
_MAX_NAME, _MAX_VALUE, _MAX_TAG = 250, 500, 5000
"""Characters of a name, of a parameter and of a tag: older servers take no more."""
_MAX_PARAMS, _MAX_METRICS = 100, 1000
"""In one request."""
_FLUSH_S = 1.0
_FILES = ("report.md", "report.html", "verdict.json", "record.json", "manifest.yaml", "log.txt")
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nothing leaves the machine but what the user's URI is sent
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # A stage waits while a request is answered: a server that is down must not cost hours.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


class MlflowTracker(Reporter):
    """Record options as parameters, curves and results as metrics, verdicts as tags, reports and models as artifacts.

    The experiment is that of `MLFLOW_EXPERIMENT_NAME`, else the manifest's name. Settings of MLflow's own that the user
    has made count.
    """

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._curves = Curves()
        self._pending: list[Metric] = []
        self._flushed_s = time.monotonic()

    def run_started(self, event: RunStarted) -> None:
        """Create the run, with its options."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient, get_tracking_uri
        from mlflow.entities import Param

        tags = {"ptpipe.run_id": event.run_id, "ptpipe.manifest": event.manifest_path}
        tags |= {"ptpipe.overrides": _shortened(" ".join(event.overrides), _MAX_TAG)} if event.overrides else {}
        # The trials of a sweep begin together: MLflow fails where two processes create its database, or an experiment.
        # Not for a server: one that is down would keep each trial waiting for all others.
        path = event.folder.parents[1] / "locks" / "mlflow"
        is_server = get_tracking_uri().startswith(("http", "databricks"))
        with nullcontext() if is_server else exclusive_lock(path, on_wait=lambda: None):
            self._client = client = MlflowClient()
            experiment = _experiment(client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or event.name)
        self._run_id = client.create_run(experiment, tags=tags, run_name=event.run_id).info.run_id
        params = [Param(_name(name), _shortened(value, _MAX_VALUE)) for name, value in options(event)]
        for start in range(0, len(params), _MAX_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def event(self, event: Event) -> None:
        """Record what the progress has of curves; requests are about a second apart."""
        if isinstance(event, Progress):
            self._add(self._curves.progress(event))
            if time.monotonic() - self._flushed_s >= _FLUSH_S:
                self._flush()

    def stage_finished(self, event: StageFinished) -> None:
        """Record the stage's results, verdict, comparison and files to ship."""
        self._add(self._curves.finished(event))
        self._flush()
        if self._client is None:
            return
        for gate in run_summary.gates([event]):
            self._client.set_tag(self._run_id, f"ptpipe.verdict.{gate.stage_id}", gate.decision)
        for table in comparisons(event):
            self._client.log_text(self._run_id, table, f"comparison/{event.stage_id}.md")
        for path in event.deliverables:
            for file in _existing(path.parent, (path.name, f"{path.name}.intoto.json")):
                self._client.log_artifact(self._run_id, str(file), f"deliverables/{event.stage_id}")

    def run_finished(self, event: RunFinished) -> None:
        """Record how the run ended, and its reports."""
        if self._client is None:
            return
        self._client.set_tag(self._run_id, "ptpipe.verdict", run_summary.ending(event))
        for path in _existing(event.folder, _FILES):
            self._client.log_artifact(self._run_id, str(path))
        self._client.set_terminated(self._run_id, _status(event))

    def _add(self, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._pending += [Metric(_name(point.name), point.value, now_ms, point.step) for point in points]

    def _flush(self) -> None:
        pending, self._pending, self._flushed_s = self._pending, [], time.monotonic()
        for start in range(0, len(pending) if self._client else 0, _MAX_METRICS):
            assert self._client
            self._client.log_batch(self._run_id, metrics=pending[start : start + _MAX_METRICS])


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the id of the experiment of that name, created if missing."""
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _status(finished: RunFinished) -> str:
    """Return MLflow's word: a run that a gate refused did finish."""
    if finished.interrupted:
        return "KILLED"
    ended = (ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED)
    return "FINISHED" if finished.exit_code in ended else "FAILED"


def _existing(folder: Path, names: Sequence[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def _name(text: str) -> str:
    """Return a name that MLflow takes: a path that is shortest, and leads to no folder above."""
    parts = _FORBIDDEN.sub("_", text)[:_MAX_NAME].split("/")
    return "/".join(part.replace(".", "_") if part in (".", "..") else part for part in parts if part)


def _shortened(value: str, length: int) -> str:
    return value if len(value) <= length else f"{value[: length - 3]}..."
