"""Run again what a run's record or a deliverable's statement names, and compare stage by stage."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ptpipe import api
from ptpipe.artifact import JSON
from ptpipe.errors import ExitCode, IntegrityError, UsageError
from ptpipe.events import Outcome
from ptpipe.execution.engine import RunOptions
from ptpipe.manifest.manifest import parse
from ptpipe.plan.bind import Plan, bind
from ptpipe.plan.keys import differences
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe.provenance.statement import Statement
from ptpipe.store.runs import find_run
from ptpipe.store.store import Store

_OF_FAILING_GATES = (Outcome.REFUSED, Outcome.UNDECIDED)
"""Together: earlier versions recorded both as refused."""
_TIMES = ("_s", "_ms")
"""Endings of the names of metrics that are times or rates: another run measures others."""


class Status(StrEnum):
    """How a stage compares with what it was."""

    EQUAL = "bit-equal"
    """All outputs have the same bytes."""
    WITHIN_TOLERANCE = "within tolerance"
    """Outputs have other bytes; the metrics are close enough."""
    MEASURED = "measured"
    """Outputs have other bytes, as expected: the stage, or one above it, measures the machine."""
    DIFFERENT = "different"
    NOT_RUN = "not run"
    """The stage failed, or one above it did."""


@dataclass(frozen=True)
class PastStage:
    """A stage's result as a record or a statement names it."""

    kind: str
    parts: Mapping[str, Any]
    """Of its key."""
    outputs: Mapping[str, str]
    """Output name to the object's digest."""
    metrics: Mapping[str, JSON]
    environment: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    """Digests of files that it read beyond those of its key."""
    is_failing_gate: bool = False
    """Whether its verdict decided how the run ended."""


@dataclass(frozen=True)
class PastRun:
    """What to run again, and the results to compare with."""

    name: str
    """A run's id, or a file."""
    manifest: str
    """The manifest's text."""
    path: Path
    """Where the manifest was or would be: plugins are found relative to its folder."""
    overrides: Mapping[str, JSON]
    stages: Mapping[str, PastStage]
    """Of the stages that have a result, by id in run order."""
    last: str | None = None
    """The only stage that is wanted, with those that it needs; None for all of the manifest."""

    def plan(self) -> Plan:
        """Bind the manifest to its plugins, which are loaded. Raises ManifestError, IntegrityError."""
        manifest = parse(self.manifest, self.path).overridden_by(self.overrides)
        plan = bind(manifest, load_vocabulary(manifest.plugins, self.path.parent))
        plan = plan if self.last is None else plan.subplan(self.last)
        if missing := [stage_id for stage_id in self.stages if stage_id not in {stage.id for stage in plan.stages}]:
            raise IntegrityError(f"{self.name} has results of {missing[0]!r}, which is no stage of its manifest")
        return plan


@dataclass(frozen=True)
class StageComparison:
    """A stage compared with what it was."""

    stage_id: str
    kind: str
    status: Status
    changes: tuple[str, ...]
    """What differs in the parts of its key, and in the environment; for a stage that was not run, why."""


@dataclass(frozen=True)
class Reproduction:
    """The result of running something again."""

    stages: tuple[StageComparison, ...]
    """In run order."""
    exit_code: ExitCode
    """Of the run."""

    @property
    def is_complete(self) -> bool:
        """Whether every stage came out as it was, as far as can be expected."""
        return all(stage.status not in (Status.DIFFERENT, Status.NOT_RUN) for stage in self.stages)

    @property
    def first_cause(self) -> StageComparison | None:
        """The first stage that did not come out bit-equal and does not measure: those below follow from it."""
        expected = (Status.EQUAL, Status.MEASURED)
        return next((stage for stage in self.stages if stage.status not in expected), None)


def past_run(store: Store, wanted: str) -> PastRun:
    """Return a run of a store. Raises UsageError where there is none, or none with a result; IntegrityError."""
    record, folder = find_run(store, wanted)
    if "manifest_sha256" not in record:
        raise UsageError(f"run {record['run_id']} cannot be reproduced: it is of another version of ptpipe")
    try:
        text = (folder / "manifest.yaml").read_bytes()
    except OSError as error:
        raise UsageError(f"run {record['run_id']} cannot be reproduced: its manifest.yaml cannot be read") from error
    if hashlib.sha256(text).hexdigest() != record["manifest_sha256"]:
        raise IntegrityError(f"{folder / 'manifest.yaml'} was altered")
    stages = {
        stage["stage_id"]: PastStage(
            stage["kind"],
            stage["parts"],
            {name: output["digest"] for name, output in stage["outputs"].items()},
            stage["metrics"],
            stage["environment"],
            stage.get("files", {}),
            stage["outcome"] in _OF_FAILING_GATES,
        )
        for stage in record["stages"]
        if stage["outputs"]
    }
    if not stages:
        raise UsageError(f"run {record['run_id']} has no result to compare with")
    return PastRun(record["run_id"], text.decode(), Path(record["manifest"]), record["overrides"], stages)


def past_statement(statement: Statement, name: str) -> PastRun:
    """Return what a statement names; its plugins are found relative to the current folder."""
    results = {result.id: result for result in statement.results}
    stages = {
        stage.id: PastStage(
            stage.kind,
            stage.parts,
            {output: facts.digest for output, facts in results[stage.id].outputs.items()},
            results[stage.id].metrics,
            results[stage.id].environment,
            results[stage.id].files,
        )
        for stage in statement.definitions
    }
    path = Path(Path(statement.manifest.name).name)
    return PastRun(name, statement.manifest.text, path, statement.overrides, stages, statement.stage)


def reproduce(past: PastRun, plan: Plan, artifacts: Path, tolerance: float | None) -> Reproduction:
    """Run a plan in an empty artifacts folder, and compare each stage with what it was.

    `tolerance`: how much a metric may differ where bytes do, absolutely or relative to the larger of the two; None if
    only equal bytes will do.
    """
    result = api.run(plan, artifacts=artifacts, options=RunOptions(keep_going=True))
    record, _ = find_run(result.store, result.run_id)
    now = {stage["stage_id"]: stage for stage in record["stages"]}
    comparisons: list[StageComparison] = []
    measured: set[str] = set()
    for stage in plan.stages:
        if stage.id not in past.stages:
            continue
        if stage.stage.per_machine or measured & set(stage.upstream):
            measured.add(stage.id)
        comparisons.append(_compare(past.stages[stage.id], now[stage.id], stage.id in measured, tolerance))
    return Reproduction(tuple(comparisons), result.exit_code)


def _compare(past: PastStage, now: Mapping[str, Any], is_measured: bool, tolerance: float | None) -> StageComparison:
    outputs = {name: output["digest"] for name, output in now["outputs"].items()}
    if not outputs:
        return StageComparison(now["stage_id"], past.kind, Status.NOT_RUN, (now["message"],))
    if outputs == past.outputs:
        status = Status.EQUAL
    elif is_measured and past.is_failing_gate == (now["outcome"] in _OF_FAILING_GATES):
        status = Status.MEASURED
    elif tolerance is not None and _are_close(past.metrics, now["metrics"], tolerance):
        status = Status.WITHIN_TOLERANCE
    else:
        status = Status.DIFFERENT
    return StageComparison(now["stage_id"], past.kind, status, tuple(_changes(past, now)))


def _changes(past: PastStage, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs in the parts of the key, but for inputs, in the files read, and in the environment."""
    yield from (line for line in differences(past.parts, now["parts"]) if not line.startswith("inputs."))
    yield from (f"it read another {path}" for path in _other_files(past.files, now["files"]))
    yield from differences(past.environment, now["environment"])


def _other_files(past: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(path for path in past.keys() | now.keys() if past.get(path) != now.get(path))


def _are_close(past: Mapping[str, JSON], now: Mapping[str, JSON], tolerance: float) -> bool:
    """Return whether there are fractional metrics, the same ones, and each is close to what it was."""
    old, new = (
        {name: value for name, value in metrics.items() if isinstance(value, float) and not name.endswith(_TIMES)}
        for metrics in (past, now)
    )
    return (
        bool(old)
        and old.keys() == new.keys()
        and all(math.isclose(value, new[name], rel_tol=tolerance, abs_tol=tolerance) for name, value in old.items())
    )
