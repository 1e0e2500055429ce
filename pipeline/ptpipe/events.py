"""ReporterGroup of a run: small frozen values that reporters are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from ptpipe.artifact import JSON


class Outcome(StrEnum):
    """How a stage ended."""

    DONE = "done"
    CACHED = "cached"
    REFUSED = "refused"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Progress:
    """How far a stage is. `total` is None where nobody knows."""

    stage_id: str
    done: int
    total: int | None
    unit: str
    facts: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """One named fact of a stage's result."""

    stage_id: str
    name: str
    value: JSON


@dataclass(frozen=True)
class Notice:
    """Something that nobody may overlook. `stage_id` is empty for the run itself."""

    stage_id: str
    text: str


@dataclass(frozen=True)
class LogLine:
    """A line for the run's log."""

    stage_id: str
    text: str


@dataclass(frozen=True)
class Attachment:
    """A file that a stage gives to the run that made it; it is copied into the run's folder."""

    stage_id: str
    path: str


Event: TypeAlias = Progress | Metric | Notice | LogLine | Attachment


@dataclass(frozen=True)
class StageStarted:
    """A stage is about to be done or taken from the store."""

    stage_id: str
    kind: str
    position: int
    """Counts from 1."""
    num_stages: int


@dataclass(frozen=True)
class StageFinished:
    """A stage's end; told exactly once for every stage of the plan."""

    stage_id: str
    kind: str
    outcome: Outcome
    seconds: float
    key: str
    """Full digest; empty where no key could be worked out (a skipped stage)."""
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    outputs: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    """Output name to `{"type", "digest", "size_bytes", "summary"}`."""
    message: str = ""
    """Why it failed, was refused or skipped; one line."""
    frames: tuple[str, ...] = ()
    """Where in the plugin's own code it failed, outermost first: `prune.py:12 in prune: amount = 1 / 0`."""
    made_at: str = ""
    """ISO 8601, UTC: when the result was made; for a cached stage, the time of the run that made it."""
    machine: str = ""
    """The fingerprint of the machine that a measured result was made on; empty otherwise."""
    deliverables: tuple[Path, ...] = ()
    """Files to ship, by absolute path in the run's folder: `runs/<id>/<stage>/model.onnx`. Kept as long as the run."""


@dataclass(frozen=True)
class RunStarted:
    """A walk over a plan begins."""

    run_id: str
    name: str
    manifest_path: str
    folder: Path
    """Where the run's record, log and reports go."""
    stage_ids: tuple[str, ...]
    seed: int
    overrides: tuple[str, ...] = ()
    verbosity: int = 0
    """How much the console says: below 0 only problems and the end, below -1 nothing, above 0 the log's lines too."""


@dataclass(frozen=True)
class RunFinished:
    """A run's end; always told, also after Ctrl-C."""

    run_id: str
    name: str
    folder: Path
    exit_code: int
    seconds: float
    stages: tuple[StageFinished, ...]
    interrupted: bool = False
