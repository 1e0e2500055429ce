"""A run's folder: its record (record.json, rewritten after each stage), its log and attached files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptpipe import host
from ptpipe.artifact import JSON
from ptpipe.errors import ExitCode, Problem, PtpipeError
from ptpipe.events import (
    Attachment,
    Event,
    FilesRead,
    LogLine,
    Metric,
    ModulesImported,
    Notice,
    RunFinished,
    RunStarted,
    StageFinished,
)
from ptpipe.plan.bind import Plan
from ptpipe.plan.keys import Key
from ptpipe.reads import ReadFile
from ptpipe.store.documents import write_document
from ptpipe.store.files import strict_json, sync, write_atomically
from ptpipe.store.runs import next_run_number
from ptpipe.store.store import Store

_MANIFEST = "manifest.yaml"


@dataclass
class StageOutput:
    """The metrics and notices of the stage that is running."""

    metrics: dict[str, JSON] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    asides: list[str] = field(default_factory=list)
    """Notices of the run about the stage: not part of its result, so not repeated when that is cached."""
    imported: list[ModulesImported] = field(default_factory=list)
    """One for each process that executed the stage."""
    files: dict[str, ReadFile] = field(default_factory=dict)
    """Files that it read besides those of its key, by absolute path."""

    def keep(self, event: Event) -> None:
        """Add what belongs to the stage's result."""
        match event:
            case Metric():
                self.metrics[event.name] = _as_json(event)
            case Notice():
                self.notices.append(event.text)
            case ModulesImported():
                self.imported.append(event)
            case FilesRead():
                for path, facts in event.files.items():
                    self.files.setdefault(path, ReadFile(*facts))  # type: ignore[arg-type]  # as from JSON


def _as_json(metric: Metric) -> JSON:
    """Return a metric's value as it will be read back from the store."""
    try:
        value: JSON = json.loads(json.dumps(metric.value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {metric.name}: {error}; say float(...), int(...) or str(...)") from None
    return value


class RunRecord:
    """The record of one run. It names the keys of all stages from the start: `gc` keeps a killed run's checkpoints."""

    def __init__(self, plan: Plan, store: Store, keys: Mapping[str, Key], warnings: Sequence[Problem] = ()) -> None:
        self.plan, self.store, self.keys, self.warnings = plan, store, keys, warnings
        now = datetime.now(UTC)
        self.folder = store.root / "runs" / f"{now:%Y%m%d-%H%M%S}-{plan.manifest.name}"  # `open` adds the number
        self.started_at = now.isoformat(timespec="milliseconds")
        self._start = time.perf_counter()

    @property
    def run_id(self) -> str:
        """The run's id: start time, manifest name, and the number of the run in its artifacts folder."""
        return self.folder.name

    @property
    def seconds(self) -> float:
        """Seconds since the run started."""
        return time.perf_counter() - self._start

    def open(self) -> None:
        """Create the folder with its first record: it is never seen without one.

        Raises PtpipeError where it can't be written.
        """
        parent = self.folder.parent
        staging = parent / f".new-{secrets.token_hex(8)}"
        try:
            with self.store.lock("runs"):  # so that no two runs get one number
                self.folder = parent / f"{self.folder.name}-{next_run_number(parent):05}"
                staging.mkdir()
                write_atomically(staging / _MANIFEST, self.plan.manifest.text.encode())
                self._write((), ExitCode.DONE, staging)
                staging.rename(self.folder)
            sync(parent)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise PtpipeError(f"cannot write to {self.folder}: {error.strerror or error}") from error

    def write(self, finished: Sequence[StageFinished], exit_code: ExitCode) -> str:
        """Update the record. Where it can't be written (a full disk) the run continues: returns the reason, else ""."""
        try:
            self._write(finished, exit_code, self.folder)
        except OSError as error:
            self.log(LogLine("", f"the record could not be written: {error}"))
            return f"the record could not be written: {error}"
        return ""

    def log(self, line: LogLine) -> None:
        """Append a line to the log; a failure to write is ignored."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        file = self.folder / "log.txt"
        with contextlib.suppress(OSError), file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"{stamp} {line.stage_id or '-'} {line.text}\n")

    def attach(self, attachment: Attachment) -> None:
        """Copy a stage's file into the folder `files/<stage>`; a failure goes to the log."""
        place = self.folder / "files" / attachment.stage_id
        try:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(attachment.path, place / Path(attachment.path).name)
        except OSError as error:
            self.log(LogLine(attachment.stage_id, f"{attachment.path} could not be kept: {error}"))

    def started(self, verbosity: int, arguments: tuple[str, ...]) -> RunStarted:
        """Return the event of the run's start; `verbosity`, `arguments`: its fields."""
        manifest = self.plan.manifest
        return RunStarted(
            run_id=self.run_id,
            name=manifest.name,
            manifest_path=str(manifest.path if manifest.is_file else self.folder / _MANIFEST),
            folder=self.folder,
            stage_ids=tuple(stage.id for stage in self.plan.stages),
            kinds=tuple(stage.kind for stage in self.plan.stages),
            locations=tuple(manifest.locate("stages", stage.id, key=True) for stage in self.plan.stages),
            started_at=self.started_at,
            seed=manifest.seed,
            overrides=tuple(f"{name}={json.dumps(value)}" for name, value in manifest.overrides.items()),
            verbosity=verbosity,
            options={stage.id: stage.options for stage in self.plan.stages},
            upstream={stage.id: stage.upstream for stage in self.plan.stages},
            arguments=arguments,
        )

    def finished(self, stages: Sequence[StageFinished], exit_code: ExitCode, interrupted: bool) -> RunFinished:
        """Return the event of the run's end, without what plugins add to reports."""
        name = self.plan.manifest.name
        return RunFinished(self.run_id, name, self.folder, int(exit_code), self.seconds, tuple(stages), interrupted)

    def _write(self, finished: Sequence[StageFinished], exit_code: ExitCode, folder: Path) -> None:
        manifest = self.plan.manifest
        record = {
            "run_id": self.run_id,
            "name": manifest.name,
            "manifest": str((manifest.path if manifest.is_file else self.folder / _MANIFEST).absolute()),
            "manifest_sha256": hashlib.sha256(manifest.text.encode()).hexdigest(),
            "seed": manifest.seed,
            "overrides": dict(manifest.overrides),
            "started_at": self.started_at,
            "seconds": self.seconds,
            "exit_code": int(exit_code),
            "finished": len(finished) == len(self.plan.stages),
            "machine": {**host.describe(), "fingerprint": host.fingerprint()},
            "warnings": [str(warning) for warning in self.warnings],
            "keys": {stage_id: key.digest for stage_id, key in self.keys.items()},
            "stages": [self._stage_facts(event) for event in finished],
        }
        write_document(folder / "record.json", strict_json(record))

    def _stage_facts(self, event: StageFinished) -> dict[str, Any]:
        # Relative: the artifacts folder may be moved.
        deliverables = [path.relative_to(self.folder).as_posix() for path in event.deliverables]
        return {**asdict(event), "deliverables": deliverables, "parts": self.keys[event.stage_id].parts}
