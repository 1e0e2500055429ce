"""One walk over a plan: each stage is taken from the store or done, in the manifest's order."""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptpipe import machine
from ptpipe.artifact import JSON, Decision
from ptpipe.errors import ExitCode, IntegrityError, ManifestError, Problem, PtpipeError, StageError, Terminated, nearest
from ptpipe.events import (
    Event,
    LogLine,
    Metric,
    Notice,
    Outcome,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
)
from ptpipe.files import write_atomically
from ptpipe.history import Forecast, forecast, is_current
from ptpipe.keys import Key, compute_keys
from ptpipe.launch import HereLaunch
from ptpipe.news import News
from ptpipe.observer import Observer
from ptpipe.plan import Plan, PlannedStage
from ptpipe.sources import SourceDigests
from ptpipe.store import Entry, Store
from ptpipe.worker import Call, StoredInput

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class RunOptions:
    """What the user said beside the manifest."""

    fresh: tuple[str, ...] = ()
    """Stages to do again although their results are stored."""
    keep_going: bool = False
    """After a failure, still do the stages that don't depend on it."""
    verbosity: int = 0
    """-1 quiet, 0 normal, 1 verbose: for observers."""


def source_digests(plan: Plan, store: Store) -> SourceDigests:
    """Digests of the code of the plan's plugins, with the store's memory of files already read."""
    modules = {plugin.module.__name__.partition(".")[0]: plugin.module for plugin in plan.vocabulary.plugins}
    cache = store.source_cache() if store.source_cache().parent.is_dir() else None
    return SourceDigests(cache, modules)


def walk(plan: Plan, store: Store, options: RunOptions, observers: Sequence[Observer] = ()) -> RunFinished:
    """Run a plan. Returns when it ended, however it ended; raises ManifestError before any work, PtpipeError where
    the artifacts folder can't be used.
    """
    unknown = [name for name in options.fresh if name not in {stage.id for stage in plan.stages}]
    if unknown:
        ids = [stage.id for stage in plan.stages]
        raise ManifestError(
            Problem(f"--fresh {n}: there is no stage {n!r}", suggestion=nearest(n, ids)) for n in unknown
        )
    sources = source_digests(plan, store)
    keys = compute_keys(plan, sources)
    if _preflight(plan, forecast(plan, keys, store, options.fresh)):
        keys = compute_keys(plan, sources)  # a preflight may have fetched what a stage reads
    store.open_for_writing()
    with store.in_use():
        sources.save()
        return _Walk(plan, store, options, keys, observers).walk()


def _preflight(plan: Plan, forecasts: Iterable[Forecast]) -> bool:
    """Ask every stage that would work whether it can. Returns whether any was asked."""
    problems: list[Problem] = []
    asked = False
    for prediction in forecasts:
        stage = plan[prediction.stage_id]
        if prediction.entry is None and stage.stage.preflight:
            asked = True
            try:
                problems += [plan.problem(stage.id, line) for line in stage.stage.preflight(stage.config)]
            except (StageError, OSError) as error:
                problems.append(plan.problem(stage.id, str(error)))
    if problems:
        raise ManifestError(problems)
    return asked


@dataclass
class _Said:
    """What a stage said while it worked."""

    metrics: dict[str, JSON] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class _Walk:
    """The state of one run."""

    def __init__(
        self, plan: Plan, store: Store, options: RunOptions, keys: Mapping[str, Key], observers: Sequence[Observer]
    ) -> None:
        self.plan, self.store, self.options, self.keys = plan, store, options, keys
        now = datetime.now(UTC)
        self.run_id = f"{now:%Y%m%d-%H%M%S}-{plan.manifest.name}-{secrets.token_hex(2)}"
        self.folder = store.root / "runs" / self.run_id
        self.started_at = now.isoformat(timespec="milliseconds")
        self.start = time.perf_counter()
        self.entries: dict[str, Entry | None] = {}
        self.finished: list[StageFinished] = []
        self.said = _Said()
        self.exit_code = ExitCode.DONE
        self.news = News([*self._offered_observers(), *observers], plan.vocabulary.manager, self._log)
        self.launcher = HereLaunch(plan.vocabulary, store, self._tell)

    def walk(self) -> RunFinished:
        self._open_folder()
        interrupted = False
        self.plan.vocabulary.manager.register(self.launcher)
        try:
            self.news.run_started(self._run_started())
            self._walk_stages()
        except (KeyboardInterrupt, Terminated) as error:
            interrupted = True
            self.exit_code = ExitCode.TERMINATED if isinstance(error, Terminated) else ExitCode.INTERRUPTED
            self._skip_rest("the run was interrupted")
        finally:
            self.plan.vocabulary.manager.unregister(self.launcher)
            self._record()
            finished = RunFinished(
                self.run_id,
                self.plan.manifest.name,
                self.folder,
                int(self.exit_code),
                time.perf_counter() - self.start,
                tuple(self.finished),
                interrupted,
            )
            self.news.run_finished(finished)
        return finished

    def _walk_stages(self) -> None:
        for position, stage in enumerate(self.plan.stages, start=1):
            missing = [name for name in stage.upstream if self.entries.get(name) is None]
            if missing:
                self._finish(stage, Outcome.SKIPPED, message=f"needs {', '.join(missing)}")
            elif self.exit_code in (ExitCode.FAILED, ExitCode.INTEGRITY) and not self.options.keep_going:
                self._finish(stage, Outcome.SKIPPED, message="a stage above failed; --keep-going would do this one")
            else:
                self.news.stage_started(StageStarted(stage.id, stage.kind, position, len(self.plan.stages)))
                self._do(stage)

    def _do(self, stage: PlannedStage) -> None:
        """Take a stage's result from the store or make it, and tell the end."""
        start = time.perf_counter()
        self.said = _Said()
        try:
            entry, cached = self._result(stage)
        except (KeyboardInterrupt, Terminated):
            self._finish(stage, Outcome.FAILED, time.perf_counter() - start, message="interrupted")
            raise
        except Exception as error:  # noqa: BLE001  # a plugin may raise anything; the run ends in good order
            self.exit_code = max(self.exit_code, _exit_code(error), key=_severity)
            self._log(LogLine(stage.id, traceback.format_exc()))
            frames = () if isinstance(error, PtpipeError) else _plugin_frames(stage, error)
            self._finish(stage, Outcome.FAILED, time.perf_counter() - start, message=_cause(error), frames=frames)
            return
        self.entries[stage.id] = entry
        outcome, message = self._judge(entry, Outcome.CACHED if cached else Outcome.DONE)
        self._finish(stage, outcome, time.perf_counter() - start, entry, message)

    def _result(self, stage: PlannedStage) -> tuple[Entry, bool]:
        """The stage's stored result and whether it was there before."""
        key = self.keys[stage.id]
        fresh = stage.id in self.options.fresh
        entry = None if fresh else self._current(stage)
        if entry is not None:
            return entry, True
        with self.store.lock(key.digest, lambda: self._say_waiting(stage)):
            entry = None if fresh else self._current(stage)  # another run may just have made it
            if entry is not None:
                return entry, True
            entry = self._make(stage)
        return entry, False

    def _current(self, stage: PlannedStage) -> Entry | None:
        entry = self.store.entry(self.keys[stage.id].digest)
        return entry if entry is not None and is_current(entry, self.plan, stage.id, self.entries) else None

    def _make(self, stage: PlannedStage) -> Entry:
        self._mend_inputs(stage)
        start = time.perf_counter()
        key = self.keys[stage.id]
        call = self._call(stage)
        outputs = self.plan.vocabulary.manager.hook.ptpipe_launch(call=call)
        stored = {name: self.store.put(artifact) for name, artifact in outputs.items()}
        entry = Entry(
            key=key.digest,
            kind=stage.kind,
            parts=key.parts,
            inputs={port: tuple(item.digest for item in items) for port, items in call.inputs.items()},
            outputs=stored,
            metrics=self.said.metrics,
            notices=tuple(self.said.notices),
            seconds=time.perf_counter() - start,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine.fingerprint() if stage.stage.measured else "",
        )
        self.store.put_entry(entry)
        self.store.drop_scratch(key.digest)
        return entry

    def _mend_inputs(self, stage: PlannedStage) -> None:
        """Make again what a stage above gave and somebody altered since."""
        for name in stage.upstream:
            entry = self.entries[name]
            assert entry is not None, f"{stage.id} started without {name}"
            try:
                for stored in entry.outputs.values():
                    self.store.verify(stored.digest)
            except IntegrityError as error:
                place = self.store.quarantine(stored.digest)
                self._tell(Notice(name, f"{error}; moved to {place}, and {name} is done again"))
                said, self.said = self.said, _Said()
                self.entries[name] = self._result(self.plan[name])[0]
                self.said = said

    def _call(self, stage: PlannedStage) -> Call:
        inputs = {
            port: tuple(
                self._stored_input(reference.stage, reference.output, str(reference)) for reference in references
            )
            for port, references in stage.wiring.items()
        }
        manifest = self.plan.manifest
        return Call(
            stage_id=stage.id,
            kind=stage.kind,
            options=stage.options,
            seed=manifest.seed,
            key=self.keys[stage.id].digest,
            inputs=inputs,
            artifacts=str(self.store.root),
            plugins=manifest.plugins,
            folder=str(manifest.path.parent.absolute()),
            workers=stage.stage.workers(stage.config) if stage.stage.workers else 1,
        )

    def _stored_input(self, stage_id: str, output: str, reference: str) -> StoredInput:
        entry = self.entries[stage_id]
        assert entry is not None, stage_id
        return StoredInput(self.plan[stage_id].kind, output, entry.outputs[output].digest, reference)

    def _judge(self, entry: Entry, outcome: Outcome) -> tuple[Outcome, str]:
        """Look for a gate's verdict among the outputs."""
        for stored in entry.outputs.values():
            decision, reason = stored.summary.get("decision"), str(stored.summary.get("reason", ""))
            if stored.type != "Verdict":
                continue
            if decision == Decision.REFUSED:
                self.exit_code = max(self.exit_code, ExitCode.REFUSED, key=_severity)
                return Outcome.REFUSED, reason
            if decision == Decision.UNDECIDED and stored.summary.get("fail_undecided"):
                self.exit_code = max(self.exit_code, ExitCode.UNDECIDED, key=_severity)
                return Outcome.REFUSED, f"undecided: {reason}"
        return outcome, ""

    def _skip_rest(self, message: str) -> None:
        told = {news.stage_id for news in self.finished}
        for stage in self.plan.stages:
            if stage.id not in told:
                self._finish(stage, Outcome.SKIPPED, message=message)

    def _finish(
        self,
        stage: PlannedStage,
        outcome: Outcome,
        seconds: float = 0.0,
        entry: Entry | None = None,
        message: str = "",
        frames: tuple[str, ...] = (),
    ) -> None:
        news = StageFinished(
            stage_id=stage.id,
            kind=stage.kind,
            outcome=outcome,
            seconds=seconds,
            key=self.keys[stage.id].digest,
            metrics=entry.metrics if entry else dict(self.said.metrics),
            notices=entry.notices if entry else tuple(self.said.notices),
            outputs={name: asdict(stored) for name, stored in entry.outputs.items()} if entry else {},
            message=message,
            frames=frames,
            made_at=entry.made_at if entry else "",
            machine=entry.machine if entry else "",
        )
        self.said = _Said()
        self.finished.append(news)
        self._record()
        self.news.stage_finished(news)

    # Telling and recording

    def _tell(self, event: Event) -> None:
        match event:
            case Metric():
                self.said.metrics[event.name] = event.value
            case Notice():
                self.said.notices.append(event.text)
            case LogLine():
                self._log(event)
        self.news.event(event)

    def _say_waiting(self, stage: PlannedStage) -> None:
        self.news.event(Notice(stage.id, "another run is doing this stage; waiting for it"))

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True)
            self._record()
        except OSError as error:
            raise PtpipeError(f"cannot write to {self.folder}: {_cause(error)}") from error

    def _log(self, line: LogLine) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        with contextlib.suppress(OSError), (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{stamp} {line.stage_id or '-'} {line.text}\n")  # a full disk must not hide the cause

    def _offered_observers(self) -> list[Observer]:
        return [observer for answer in self.plan.vocabulary.manager.hook.ptpipe_observers() for observer in answer]

    def _run_started(self) -> RunStarted:
        manifest = self.plan.manifest
        return RunStarted(
            run_id=self.run_id,
            name=manifest.name,
            manifest_path=str(manifest.path),
            folder=self.folder,
            stage_ids=tuple(stage.id for stage in self.plan.stages),
            seed=manifest.seed,
            overrides=tuple(f"{name}={json.dumps(value)}" for name, value in manifest.overrides.items()),
            verbosity=self.options.verbosity,
        )

    def _record(self) -> None:
        """Write the run's record. On a full disk the run still ends in good order, without it."""
        record = {
            "run_id": self.run_id,
            "name": self.plan.manifest.name,
            "manifest": str(self.plan.manifest.path.absolute()),
            "seed": self.plan.manifest.seed,
            "overrides": dict(self.plan.manifest.overrides),
            "started_at": self.started_at,
            "seconds": time.perf_counter() - self.start,
            "exit_code": int(self.exit_code),
            "finished": len(self.finished) == len(self.plan.stages),
            "machine": {**machine.describe(), "fingerprint": machine.fingerprint()},
            "stages": [self._stage_record(news) for news in self.finished],
        }
        try:
            write_atomically(self.folder / "record.json", json.dumps(record, indent=1, default=str).encode())
        except OSError as error:
            if error.errno not in _FULL_DISK:
                raise

    def _stage_record(self, news: StageFinished) -> dict[str, Any]:
        return {**asdict(news), "parts": self.keys[news.stage_id].parts}


def _severity(code: ExitCode) -> int:
    """Of several endings, the graver one is the process's."""
    order = (ExitCode.DONE, ExitCode.UNDECIDED, ExitCode.REFUSED, ExitCode.FAILED, ExitCode.INTEGRITY)
    return order.index(code)


def _exit_code(error: Exception) -> ExitCode:
    return ExitCode.INTEGRITY if isinstance(error, IntegrityError) else ExitCode.FAILED


def _cause(error: Exception) -> str:
    """The error in one line."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        return f"the disk is full: {text}"
    if isinstance(error, PtpipeError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plugin_frames(stage: PlannedStage, error: Exception) -> tuple[str, ...]:
    """The frames of the traceback that lie in the plugin's own code."""
    own = Path(stage.stage.function.__code__.co_filename)
    root = own.parent if own.name == "__init__.py" else own
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename) == root or root in Path(frame.filename).parents]
    return tuple(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in inside)
