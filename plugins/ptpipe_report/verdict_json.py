"""`verdict.json`: what a run decided, for other programs. `verdict.schema.json` beside this file is its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime

from ptpipe import JSON, ExitCode, Location, Outcome, RunFinished, RunStarted, StageFinished, __version__
from ptpipe_report import run_summary
from ptpipe_report.json_lines import to_json

VERSION = 1
"""Raised when a property is removed or means something else; a property that is added leaves it as it is."""


def verdict(started: RunStarted, finished: RunFinished, at: datetime) -> JSON:
    """Return the content of the file; `at`: when the run ended. Raises OSError where a deliverable is gone."""
    locations = run_summary.locations(started)
    return to_json(
        {
            "version": VERSION,
            "ptpipe_version": __version__,
            "run_id": finished.run_id,
            "name": finished.name,
            "manifest": started.manifest_path,
            "seed": started.seed,
            "overrides": list(started.overrides),
            "started_at": started.started_at,
            "finished_at": at.isoformat(timespec="milliseconds"),
            "seconds": finished.seconds,
            "exit_code": finished.exit_code,
            "ending": ExitCode(finished.exit_code).name.lower(),
            "gates": [_gate(gate, locations) for gate in run_summary.gates(finished.stages)],
            "failed_stages": _without_result(finished, {Outcome.FAILED, Outcome.INTERRUPTED}, locations),
            "skipped_stages": _without_result(finished, {Outcome.SKIPPED}, locations),
            "deliverables": list(_deliverables(finished)),
        }
    )


def _without_result(
    finished: RunFinished, outcomes: Collection[Outcome], locations: Mapping[str, Location]
) -> list[dict[str, object]]:
    return [
        {**_stage(stage, locations), "message": stage.message} for stage in finished.stages if stage.outcome in outcomes
    ]


def _stage(stage: StageFinished, locations: Mapping[str, Location]) -> dict[str, object]:
    place = locations[stage.stage_id]
    return {
        "stage_id": stage.stage_id,
        "kind": stage.kind,
        "key": stage.key,
        "seconds": stage.seconds,
        "location": {"path": place.path, "line": place.line, "column": place.column},
    }


def _gate(gate: run_summary.Gate, locations: Mapping[str, Location]) -> dict[str, object]:
    return {
        **_stage(gate.stage, locations),
        "output": gate.output,
        "decision": gate.decision,
        "reason": gate.reason,
        "fails_run": gate.fails_run,
        "facts": gate.facts,
    }


def _deliverables(finished: RunFinished) -> Iterator[dict[str, JSON]]:
    """Yield each file with the digest of its statement: the run has verified the bytes, of which there may be many."""
    for stage in finished.stages:
        for path in stage.deliverables:
            file = finished.folder / path
            statement = json.loads(file.with_name(f"{file.name}.intoto.json").read_bytes())
            yield {
                "stage_id": stage.stage_id,
                "path": run_summary.relative_to_run(path, finished).as_posix(),
                "sha256": statement["subject"][0]["digest"]["sha256"],
                "size_bytes": file.stat().st_size,
            }
