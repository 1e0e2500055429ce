"""Where the results of a run come from, and how to get them again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptpipe import RunFinished, RunStarted, host
from ptpipe_report import run_summary
from ptpipe_report.formatting import bytes_text

_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "sve", "bf16"),
)
"""Instruction sets that int8 and bfloat16 kernels choose by."""
_MAX_MANIFEST = 40_000


@dataclass(frozen=True)
class Delivered:
    """A file to ship."""

    path: str
    size: str
    sha256: str
    """Empty where no statement is beside it."""


@dataclass(frozen=True)
class Provenance:
    """Everything that a run depends on."""

    command: str
    facts: Sequence[tuple[str, str]]
    packages: Sequence[tuple[str, str]]
    manifest: str
    """Its text, as run."""
    files: Sequence[Delivered]
    options: Sequence[tuple[str, str, str]]
    """Stage, kind, and its options as JSON, defaults filled in."""


def provenance(started: RunStarted, finished: RunFinished, record: Mapping[str, Any]) -> Provenance:
    """Return it, as far as the run's folder has it. `record`: the content of `record.json`; may be empty."""
    parts = {
        str(stage.get("stage_id")): (str(stage.get("kind")), stage["parts"])
        for stage in record.get("stages") or ()
        if isinstance(stage, Mapping) and isinstance(stage.get("parts"), Mapping)
    }
    packages = {item for _, part in parts.values() for item in dict(part.get("packages") or {}).items()}
    return Provenance(
        run_summary.command(started),
        [*_facts(started, finished, record), *_machines(finished)],
        sorted((str(name), str(version)) for name, version in packages),
        _manifest_text(finished.folder),
        [_delivered(finished.folder, path) for path in run_summary.deliverables(finished)],
        [
            (name, kind, json.dumps(part.get("config"), ensure_ascii=False))
            for name, (kind, part) in parts.items()
            if part.get("config")
        ],
    )


def read_record(folder: Path) -> Mapping[str, Any]:
    """Return a run's record; empty where it can't be read."""
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _facts(started: RunStarted, finished: RunFinished, record: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("run", finished.run_id),
        ("manifest", started.manifest_path),
        ("manifest SHA-256", str(record.get("manifest_sha256", ""))),
        ("overrides", ", ".join(started.overrides) or "none"),
        ("seed", str(started.seed)),
        ("started", str(record.get("started_at", "")).partition(".")[0].replace("T", " ") + " UTC"),
        ("exit code", str(finished.exit_code)),
    ]


def _machines(finished: RunFinished) -> list[tuple[str, str]]:
    """Return versions and machine, those of earlier runs too where results were cached."""
    found: dict[str, None] = {}
    for stage in finished.stages:
        environment, machine = stage.environment, stage.environment.get("machine")
        if environment and isinstance(machine, Mapping):
            versions = f"ptpipe {environment.get('ptpipe')}, Python {environment.get('python')}"
            about = f"{machine.get('processor')}, {machine.get('num_cpus')} CPUs, {machine.get('num_threads')} threads"
            found[f"{versions}; {about}; {machine.get('system')} {machine.get('architecture')}"] = None
    flags = host.cpu_flags()
    shown = [("results of", text) for text in found]
    own = [flag for flag in _FLAGS if flag in flags] if flags else []
    return [*shown, ("instruction sets here", ", ".join(own) or "unknown")]


def _manifest_text(folder: Path) -> str:
    try:
        with (folder / "manifest.yaml").open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_MANIFEST + 1)
    except OSError:
        return ""
    return text if len(text) <= _MAX_MANIFEST else f"{text[:_MAX_MANIFEST]}\n... the rest is in manifest.yaml"


def _delivered(folder: Path, path: Path) -> Delivered:
    file = folder / path
    try:
        size = bytes_text(file.stat().st_size)
    except OSError:
        size = ""
    try:
        statement = json.loads(file.with_name(f"{file.name}.intoto.json").read_text(encoding="utf-8"))
        digest = str(statement["subject"][0]["digest"]["sha256"])
    except (OSError, ValueError, LookupError, TypeError):
        digest = ""
    return Delivered(path.as_posix(), size, digest)
