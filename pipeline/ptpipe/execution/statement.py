"""Statements: where a deliverable comes from, as an in-toto Statement with SLSA provenance in a file beside it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ptpipe
from ptpipe import host
from ptpipe.artifact import JSON
from ptpipe.execution.record import RunRecord
from ptpipe.plan.bind import PlannedStage
from ptpipe.plan.read_files import listed_digests
from ptpipe.store.documents import write_document
from ptpipe.store.files import strict_json
from ptpipe.store.store import Entry

SUFFIX = ".intoto.json"
"""What is appended to a deliverable's name."""
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:ptpipe:run:v1"


def statement_path(deliverable: Path) -> Path:
    """Return the place of a deliverable's statement: beside it."""
    return deliverable.parent / f"{deliverable.name}{SUFFIX}"


def describe_environment() -> dict[str, JSON]:
    """Return the versions of ptpipe and Python, and the machine without its name."""
    machine: dict[str, JSON] = {name: value for name, value in host.describe().items() if name != "host"}
    machine["fingerprint"] = host.fingerprint()
    return {"ptpipe": ptpipe.__version__, "python": platform.python_version(), "machine": machine}


def write_statements(
    record: RunRecord, stage_id: str, entries: Mapping[str, Entry | None], placed: Mapping[Path, tuple[str, str]]
) -> None:
    """Write a statement beside each deliverable of a stage.

    `entries`: results by stage id, of this stage and those above. `placed`: as `place_deliverables` returned it.
    Raises OSError where one can't be written, ValueError where a deliverable has the name of another's statement.
    """
    stages = record.plan.subplan(stage_id).stages
    for path, (output, name) in placed.items():
        if statement_path(path) in placed:
            raise ValueError(f"{path.name} and {statement_path(path).name} are both deliverables: rename one")
        entry = entries[stage_id]
        assert entry is not None, f"{stage_id} has deliverables and no result"
        files = record.store.listing(entry.outputs[output].digest)
        results = [_result(stage.id, entries[stage.id]) for stage in stages]
        results[-1]["outputs"][output]["files"] = files
        statement = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": files[name]["sha256"]}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "buildDefinition": _build_definition(record, stages, output),
                "runDetails": _run_details(record, results),
            },
        }
        write_document(statement_path(path), strict_json(statement))


def _build_definition(record: RunRecord, stages: tuple[PlannedStage, ...], output: str) -> dict[str, Any]:
    """Everything that decides the deliverable: the same for every run of the same."""
    manifest = record.plan.manifest
    source = {"name": manifest.path.name, "text": manifest.text}
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "manifest": source,
            "overrides": dict(manifest.overrides),
            "stage": stages[-1].id,
            "output": output,
        },
        "internalParameters": {
            "seed": manifest.seed,
            "stages": [
                {"id": stage.id, "kind": stage.kind, "key": key.digest, "parts": key.parts}
                for stage in stages
                for key in [record.keys[stage.id]]
            ],
        },
        "resolvedDependencies": list(_dependencies(record, stages)),
    }


def _dependencies(record: RunRecord, stages: Iterable[PlannedStage]) -> Iterable[dict[str, Any]]:
    """Yield what came from outside: the manifest, plugins' sources, packages, files that stages read."""
    manifest = record.plan.manifest
    yield {"name": manifest.path.name, "digest": {"sha256": hashlib.sha256(manifest.text.encode()).hexdigest()}}
    parts: dict[str, Mapping[str, Any]] = {stage.id: record.keys[stage.id].parts for stage in stages}
    owners = record.plan.vocabulary.owners
    plugins = {owners[part["kind"]].name: part["source"] for part in parts.values()}
    for name, digest in sorted(plugins.items()):
        yield {"name": f"plugin {name}", "digest": {"ptpipeSource": digest}}
    files = {item for part in parts.values() for item in part.get("source_files", {}).items()}
    for name, digest in sorted(files):
        yield {"name": f"source file {name}", "digest": {"ptpipeSource": digest}}
    packages = {item for part in parts.values() for item in part["packages"].items()}
    for name, version in sorted({*packages, ("ptpipe", ptpipe.__version__)}):
        yield {"uri": f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version, safe='')}"}
    for stage_id, part in parts.items():
        if part["fingerprint"] is not None:
            text = json.dumps(part["fingerprint"], sort_keys=True, separators=(",", ":"))
            digest = hashlib.sha256(text.encode()).hexdigest()
            yield {"name": f"files read by {stage_id}", "digest": {"ptpipeFingerprint": digest}}


def _run_details(record: RunRecord, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what may differ between runs of the same."""
    metadata = {"invocationId": record.run_id, "startedOn": record.started_at, "ptpipe_results": results}
    builder = {"id": "urn:ptpipe:local", "version": {"ptpipe": ptpipe.__version__, "python": platform.python_version()}}
    return {"builder": builder, "metadata": metadata}


def _result(stage_id: str, entry: Entry | None) -> dict[str, Any]:
    assert entry is not None, f"a deliverable depends on {stage_id}, which has no result"
    outputs = {name: {"type": stored.type, "digest": stored.digest} for name, stored in entry.outputs.items()}
    return {
        "id": stage_id,
        "inputs": entry.inputs,
        "outputs": outputs,
        "metrics": entry.metrics,
        "made_at": entry.made_at,
        "environment": entry.environment,
        "dependencies": entry.dependencies,
        "files": listed_digests(entry.files),
    }
