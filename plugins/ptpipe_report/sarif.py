"""`report.sarif`: refused and undecided gates and failed stages as SARIF 2.1.0, each at its line of the manifest.

See https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html, and for the properties that GitHub's code
scanning wants https://docs.github.com/en/code-security/reference/code-scanning/sarif-files/sarif-support.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from ptpipe import ExitCode, Location, Outcome, RunFinished, RunStarted, StageFinished, __version__, one_line
from ptpipe_report import run_summary
from ptpipe_report.json_lines import to_json
from ptpipe_report.repository import path_in_repository

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"
_BY_DESIGN = (ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED)


def sarif_log(started: RunStarted, finished: RunFinished, at: datetime) -> Mapping[str, Any]:
    """Return the content of the file; `at`: when the run ended."""
    results = list(_results(started, finished))
    kinds = dict.fromkeys(result["ruleId"] for result in results)
    invocation: dict[str, Any] = {
        "executionSuccessful": finished.exit_code in _BY_DESIGN,
        "exitCode": finished.exit_code,
        "exitCodeDescription": run_summary.ending(finished),
        "endTimeUtc": _utc(at.isoformat(timespec="milliseconds")),
    }
    if started.started_at:
        invocation["startTimeUtc"] = _utc(started.started_at)
    run = {
        "tool": {"driver": {"name": "ptpipe", "version": __version__, "rules": [_rule(kind) for kind in kinds]}},
        # The trailing slash says that this is the category alone; a further part would be the single run's id.
        "automationDetails": {"id": f"ptpipe/{finished.name}/"},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [to_json(run)]}


def _results(started: RunStarted, finished: RunFinished) -> Iterator[dict[str, Any]]:
    locations = run_summary.locations(started)
    for stage in finished.stages:
        place = _place(stage, locations[stage.stage_id])
        for gate in run_summary.gates([stage]):
            if not gate.is_passed:
                text = f"{stage.stage_id} {gate.decision}: {gate.reason}"
                yield place | {"level": "error" if gate.fails_run else "warning", "message": {"text": _message(text)}}
        if stage in run_summary.failed_stages([stage]):
            text = f"{stage.stage_id} failed: {stage.message}"
            yield place | {"level": "error", "message": {"text": _message(text)}}
        if stage.outcome is Outcome.INTERRUPTED:
            yield place | {"level": "error", "message": {"text": _message(f"{stage.stage_id} was interrupted")}}


def _place(stage: StageFinished, location: Location) -> dict[str, Any]:
    path = path_in_repository(location.path)
    uri = quote(path.encode("utf-8", "surrogateescape"))
    file = {"uri": f"file://{uri}"} if path.startswith("/") else {"uri": uri, "uriBaseId": _ROOT}
    region = {
        "startLine": location.line,
        "startColumn": location.column,
        "endLine": location.line,
        "endColumn": location.column + len(stage.stage_id),
    }
    # What tells whether an alert is one of an earlier commit: where in the file the stage is does not matter.
    identity = hashlib.sha256(f"{path}\n{stage.stage_id}".encode("utf-8", "replace")).hexdigest()
    return {
        "ruleId": stage.kind,
        "locations": [{"physicalLocation": {"artifactLocation": file, "region": region}}],
        "partialFingerprints": {"primaryLocationLineHash": f"{identity[:16]}:1"},
    }


def _rule(kind: str) -> dict[str, Any]:
    text = f"The stage {kind} of a manifest failed, refused or could not decide."
    help_ = f"`ptpipe stages {kind}` explains the stage's options; the run's report.md has all figures."
    return {
        "id": kind,
        "shortDescription": {"text": text},
        "fullDescription": {"text": text},
        "help": {"text": help_},
        "defaultConfiguration": {"level": "error"},
    }


def _message(text: str) -> str:
    """Return the text of a message in which braces and brackets stand for themselves (sections 3.11.5 and 3.11.6)."""
    return one_line(text).replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _utc(time: str) -> str:
    """Return ISO 8601 with `Z` for UTC, as SARIF wants it."""
    return time.replace("+00:00", "Z")
