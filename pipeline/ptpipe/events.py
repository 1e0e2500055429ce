"""The events of a run: immutable values that reporters receive."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, get_args

from ptpipe.artifact import JSON
from ptpipe.errors import Location

if TYPE_CHECKING:
    from ptpipe.sections import Section


class Outcome(StrEnum):
    """How a stage ended."""

    DONE = "done"
    CACHED = "cached"
    """Its result was in the store."""
    REFUSED = "refused"
    """It is a gate and refused."""
    UNDECIDED = "undecided"
    """It is a gate that could not decide, and is configured to fail then."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """A signal ended it, as Ctrl-C does."""
    SKIPPED = "skipped"
    """A stage that it needs did not finish, or the run ended before."""


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    stage_id: str
    done: int
    """In units of `unit`."""
    total: int | None
    """None if unknown."""
    unit: str
    """Plural: "images"."""
    facts: Mapping[str, float | int | str] = field(default_factory=dict)
    """Current values, such as the loss, by name."""


@dataclass(frozen=True)
class Metric:
    """One named fact about a stage's result; a later value of the same name replaces it."""

    stage_id: str
    name: str
    value: JSON


@dataclass(frozen=True)
class Notice:
    """A line that the user must not miss. `stage_id` is empty for the run itself."""

    stage_id: str
    text: str


@dataclass(frozen=True)
class LogLine:
    """A line for the run's log. `stage_id` is empty for the run itself."""

    stage_id: str
    text: str
    shown: bool = False
    """On the screen without --verbose too."""


@dataclass(frozen=True)
class Attachment:
    """A file that is copied to the run's folder."""

    stage_id: str
    path: str
    """In the stage's scratch folder."""


@dataclass(frozen=True)
class ModulesImported:
    """What the process that executed a stage had imported at its end. Not passed on to reporters."""

    stage_id: str
    modules: Mapping[str, Sequence[str | bool]]
    """The user's own modules by name, each with the fields of an ImportedModule (ptpipe.plan.module_files)."""


@dataclass(frozen=True)
class FilesRead:
    """The files that a stage's result depends on beyond those of its key. Not passed on to reporters."""

    stage_id: str
    files: Mapping[str, Sequence[int | str]]
    """By absolute path, each with the fields of a ReadFile (ptpipe.reads), as it was when it was opened."""


Event: TypeAlias = Progress | Metric | Notice | LogLine | Attachment | ModulesImported | FilesRead
_EVENT_TYPES: dict[str, Callable[..., Event]] = {type_.__name__: type_ for type_ in get_args(Event)}


def event_to_json(event: Event) -> str:
    """Return an event of a stage as one line of JSON, for the process that reports it."""
    return json.dumps([type(event).__name__, asdict(event)])


def event_from_json(text: str | bytes) -> Event:
    """Return the event that `event_to_json` wrote as `text`. Raises ValueError for an incomplete line."""
    name, values = json.loads(text)
    return _EVENT_TYPES[name](**values)


@dataclass(frozen=True)
class StageStarted:
    """A stage is about to be executed or taken from the store."""

    stage_id: str
    kind: str
    position: int
    """Counts from 1."""
    num_stages: int


@dataclass(frozen=True)
class StageFinished:
    """The end of a stage; reported exactly once for every stage of the plan."""

    stage_id: str
    kind: str
    outcome: Outcome
    seconds: float
    """Wall time; that of reading the store for a cached stage."""
    key: str
    """Full digest of everything that decides the result."""
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    outputs: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    """Output name to `{"type", "digest", "size_bytes", "summary"}`."""
    message: str = ""
    """Why it failed, refused, could not decide or was skipped; one line."""
    frames: tuple[str, ...] = ()
    """The plugin's frames of the traceback, outermost first: `prune.py:12 in prune: amount = 1 / 0`."""
    made_at: str = ""
    """ISO 8601, UTC: when the result was produced; for a cached stage, by an earlier run."""
    machine: str = ""
    """The fingerprint of the machine that a `per_machine` result was measured on; empty otherwise."""
    environment: Mapping[str, JSON] = field(default_factory=dict)
    """Versions of ptpipe and Python, and the machine, that produced the result, in an earlier run if it is cached."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files that `ctx.reads` named, by name; more than 100 are one item, `250 files`."""
    deliverables: tuple[Path, ...] = ()
    """Files to ship, by absolute path in the run's folder: `runs/<id>/<stage>/model.onnx`. Kept as long as the run."""


@dataclass(frozen=True)
class RunStarted:
    """A run begins."""

    run_id: str
    name: str
    manifest_path: str
    folder: Path
    """Where the run's record, log and reports go."""
    stage_ids: tuple[str, ...]
    """In run order."""
    seed: int
    overrides: tuple[str, ...] = ()
    """As on the command line: `finetune.lr=0.001`."""
    verbosity: int = 0
    """What the console shows: below 0 only problems and the end, below -1 nothing, above 0 log lines too."""
    kinds: tuple[str, ...] = ()
    """Of the stages, in run order."""
    locations: tuple[Location | None, ...] = ()
    """Of the stages' ids in the manifest, in run order, with the path as in `manifest_path`."""
    started_at: str = ""
    """ISO 8601, UTC."""
    options: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    """Of the stages, by stage id, defaults filled in."""
    upstream: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each stage, the ids of the stages that it has inputs from."""
    arguments: tuple[str, ...] = ()
    """Of the command line: those that name the machines that run it together (`--nnodes 2`)."""


@dataclass(frozen=True)
class RunFinished:
    """The end of a run; always reported, also after Ctrl-C."""

    run_id: str
    name: str
    folder: Path
    exit_code: int
    seconds: float
    stages: tuple[StageFinished, ...]
    """In run order."""
    interrupted: bool = False
    """By SIGINT, SIGTERM or SIGHUP."""
    sections: tuple[Section, ...] = ()
    """What plugins add to reports: the results of `ptpipe_report_sections`."""
