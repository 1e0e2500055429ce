"""The execution engine: runs a plan's stages in order, each taken from the store or launched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ptpipe import host
from ptpipe.artifact import Artifact, Verdict
from ptpipe.errors import ExitCode, IntegrityError, ManifestError, Problem, StageError, Terminated
from ptpipe.events import (
    Attachment,
    Event,
    FilesRead,
    LogLine,
    ModulesImported,
    Notice,
    Outcome,
    RunFinished,
    StageFinished,
    StageStarted,
)
from ptpipe.execution.call import ONE_NODE, Call, Nodes, make_call
from ptpipe.execution.causes import cause, frames
from ptpipe.execution.deliverables import place_deliverables
from ptpipe.execution.gates import judge, withheld_inputs
from ptpipe.execution.local_launcher import LocalLauncher
from ptpipe.execution.record import RunRecord, StageOutput
from ptpipe.execution.report_sections import report_sections
from ptpipe.execution.reporters import ReporterGroup
from ptpipe.execution.signals import signals_deferred
from ptpipe.execution.statement import describe_environment, write_statements
from ptpipe.execution.stored_results import StoredResults
from ptpipe.execution.unchanged import check_unchanged
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.cache_status import CacheStatus, cache_statuses, check_results
from ptpipe.plan.keys import compute_keys
from ptpipe.plan.read_files import kept_files, listed_digests
from ptpipe.plan.source_digest import SourceDigests
from ptpipe.plan.vocabulary import gc_paused
from ptpipe.printable import error_text
from ptpipe.reporter import Reporter
from ptpipe.sections import Section
from ptpipe.store.store import Entry, Store, StoredObject

_OUTCOMES = {ExitCode.REFUSED: Outcome.REFUSED, ExitCode.UNDECIDED: Outcome.UNDECIDED}
"""Of a gate, by the exit code that its verdict asks for; one that passes is done or cached as other stages are."""


@dataclass(frozen=True)
class RunOptions:
    """How to run a manifest: the options of `ptpipe run`."""

    fresh: tuple[str, ...] = ()
    """Ids of stages to run again although their results are stored."""
    keep_going: bool = False
    """After a failure, still run the stages that do not depend on it."""
    verbosity: int = 0
    """-1 quiet, 0 normal, 1 verbose: for reporters."""
    nodes: Nodes = ONE_NODE
    """The machines that run the manifest together, and which of them this is."""


def source_digests(plan: Plan, store: Store) -> SourceDigests:
    """Return the digests of the plan's plugins' source code, with the store's cache of files already read."""
    modules = {plugin.module.__name__.partition(".")[0]: plugin.module for plugin in plan.vocabulary.plugins}
    cache = store.source_cache() if store.source_cache().parent.is_dir() else None
    return SourceDigests(cache, modules, plan.vocabulary.built_in_folders)


def execute(plan: Plan, store: Store, options: RunOptions, reporters: Sequence[Reporter] = ()) -> RunFinished:
    """Run a plan and return its end, however it ended.

    Raises ManifestError before any work, PtpipeError where the artifacts folder can't be used.
    """
    with gc_paused():
        sources = source_digests(plan, store)
        keys = compute_keys(plan, sources)
        statuses = cache_statuses(plan, keys, store, sources, options.fresh)
        warnings = check_results(plan, statuses)
        if _preflight(plan, statuses):
            keys = compute_keys(plan, sources)  # a preflight may have fetched what a stage reads
    notice = store.open_for_writing()
    with store.in_use(_report_wait):
        ended = _Execution(RunRecord(plan, store, keys, warnings), sources, options, reporters).execute(notice)
        sources.save()  # last: the check after a stage looks at all plugins
        return ended


def _report_wait() -> None:
    # No reporter hears of a run that has not begun, and it must not begin while runs are being deleted.
    print("`ptpipe gc` is using the artifacts folder; waiting for it", file=sys.stderr)  # noqa: T201


def _preflight(plan: Plan, statuses: Iterable[CacheStatus]) -> bool:
    """Call the preflight of every stage that would run. Returns whether any was called."""
    problems, asked = list[Problem](), False
    for prediction in statuses:
        stage = plan[prediction.stage_id]
        if prediction.entry is None and stage.stage.preflight:
            asked = True
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    problems += [plan.problem(stage.id, line) for line in stage.stage.preflight(stage.config)]
            except (StageError, OSError) as error:
                problems.append(plan.problem(stage.id, error_text(error)))
            except (Exception, SystemExit) as error:  # noqa: BLE001  # a plugin may raise anything
                problems.append(plan.plugin_problem(stage.id, "preflight()", error))
    if problems:
        raise ManifestError(problems)
    return asked


class _Execution:
    """The state of one run."""

    def __init__(
        self, record: RunRecord, sources: SourceDigests, options: RunOptions, reporters: Sequence[Reporter]
    ) -> None:
        self.record, self.sources, self.options = record, sources, options
        self.plan, self.store, self.keys = record.plan, record.store, record.keys
        self.results = StoredResults(self.plan, self.keys, self.store, sources)
        self.entries: dict[str, Entry | None] = {}
        self.finished: list[StageFinished] = []
        self.stage_output = StageOutput()
        self.exit_code = ExitCode.DONE
        self.reporters = ReporterGroup.of_plugins(self.plan.vocabulary.manager, reporters, record.log)
        self.launcher = LocalLauncher(self.plan.vocabulary, self.store)

    def execute(self, notice: str) -> RunFinished:
        self.record.open()
        self.plan.vocabulary.manager.register(self.launcher)
        ending: BaseException | None = None
        try:
            self._execute_stages(notice)
        except BaseException as error:  # noqa: BLE001  # raised again below, after the reporters have heard of it
            ending = error
        with signals_deferred():
            finished = self._end(ending)
            self.reporters.run_finished(replace(finished, sections=self._sections(finished)))
        if ending is not None and not isinstance(ending, KeyboardInterrupt | Terminated):
            raise ending
        return finished

    def _sections(self, finished: RunFinished) -> tuple[Section, ...]:
        """Return what plugins add to reports. A second Ctrl-C does not wait for it."""
        try:
            return report_sections(self.plan, self.store, finished, partial(self._notify, ""))
        except (KeyboardInterrupt, Terminated):
            self._notify("", "interrupted: the report has nothing that plugins add")
            return ()

    def _end(self, ending: BaseException | None) -> RunFinished:
        """Record the end, whatever it was."""
        self.plan.vocabulary.manager.unregister(self.launcher)
        interrupted = isinstance(ending, KeyboardInterrupt | Terminated)
        if interrupted:
            self.exit_code = ending.exit_code if isinstance(ending, Terminated) else ExitCode.INTERRUPTED
            self._skip_rest("the run was interrupted")
        elif ending is not None:
            self.exit_code = ExitCode.BUG
            self._skip_rest("ptpipe failed: this is a bug of ours")
        if problem := self.record.write(self.finished, self.exit_code):
            self.reporters.event(Notice("", problem))
        return self.record.finished(self.finished, self.exit_code, interrupted)

    def _execute_stages(self, notice: str) -> None:
        self.reporters.run_started(self.record.started(self.options.verbosity, self.options.nodes.arguments))
        self.reporters.report_missing()
        for text in (*([notice] if notice else []), *map(str, self.record.warnings)):
            self._notify("", text)
        for position, stage in enumerate(self.plan.stages, start=1):
            missing = [name for name in stage.upstream if self.entries.get(name) is None]
            if missing:
                self._finish(stage, Outcome.SKIPPED, message=f"needs {', '.join(missing)}")
            elif withheld := withheld_inputs(self.plan, stage, self._failing_gates()):
                self._finish(stage, Outcome.SKIPPED, message=f"needs {', '.join(withheld)}, which did not pass")
            elif self.exit_code in (ExitCode.FAILED, ExitCode.INTEGRITY) and not self.options.keep_going:
                self._finish(stage, Outcome.SKIPPED, message="a stage above failed; --keep-going would run this one")
            else:
                self.reporters.stage_started(StageStarted(stage.id, stage.kind, position, len(self.plan.stages)))
                self._run_stage(stage)

    def _failing_gates(self) -> set[str]:
        return {event.stage_id for event in self.finished if event.outcome in _OUTCOMES.values()}

    def _run_stage(self, stage: PlannedStage) -> None:
        """Take a stage's result from the store or launch the stage, and report its end."""
        start = time.perf_counter()
        self.stage_output = StageOutput()
        try:
            entry, cached = self._result(stage)
            code, reason = judge(stage, entry)
        except (KeyboardInterrupt, Terminated):
            self._finish(stage, Outcome.INTERRUPTED, seconds=time.perf_counter() - start, message="interrupted")
            raise
        except BaseException as error:  # noqa: BLE001  # a plugin may raise anything, SystemExit too
            self.exit_code = max(self.exit_code, _exit_code(error), key=_severity)
            self.record.log(LogLine(stage.id, traceback.format_exc()))
            shown, seconds = frames(self.plan, stage, error), time.perf_counter() - start
            self._finish(stage, Outcome.FAILED, seconds=seconds, message=cause(error), frames=shown)
            return
        self.entries[stage.id] = entry
        outcome = _OUTCOMES.get(code, Outcome.CACHED if cached else Outcome.DONE)
        self.exit_code = max(self.exit_code, code, key=_severity)
        self._finish(stage, outcome, entry, seconds=time.perf_counter() - start, message=reason)

    def _result(self, stage: PlannedStage, suspects: Collection[str] = ()) -> tuple[Entry, bool]:
        """Return the stage's stored result, and whether it was cached; `suspects`: outputs to verify in any case."""
        is_fresh = stage.id in self.options.fresh and stage.id not in self.entries
        if not is_fresh and (entry := self._stored(stage, suspects)):
            self.store.drop_leftover_scratch(entry.key)
            return entry, True
        with self.store.lock(
            self.keys[stage.id].digest,
            lambda: self._notify(stage.id, "another run is running this stage; waiting for it"),
        ):
            # Another run may just have stored it, or rebuilt what was altered.
            if not is_fresh and (entry := self._stored(stage, suspects, is_locked=True)):
                return entry, True
            return self._launch(stage), False

    def _stored(self, stage: PlannedStage, suspects: Collection[str], is_locked: bool = False) -> Entry | None:
        """Return the stage's stored result if it is sound. With its key locked, what was altered goes to quarantine."""
        entry, faults = self.results.find(stage, self.entries, suspects)
        for fault in faults if is_locked else ():
            place = fault.quarantine()
            self._notify(stage.id, f"{fault.error}; {f'moved to {place}, and ' if place else ''}{stage.id} is rerun")
        return None if faults else entry

    def _launch(self, stage: PlannedStage) -> Entry:
        self._rebuild_inputs(stage)
        start = time.perf_counter()
        key = self.keys[stage.id]
        call = self._call(stage)
        self.store.claim_scratch(key.digest, self._origin(stage))
        outputs = self.plan.vocabulary.manager.hook.ptpipe_launch(call=call, tell=self._on_event)
        stored = self._store_outputs(stage, outputs)
        try:
            dependencies = check_unchanged(self.plan, stage, key, self.sources, self.stage_output.imported)
        except StageError:
            self.store.drop_scratch(key.digest)  # its checkpoints are no truer than the result
            raise
        files, notices = kept_files(self.stage_output.files, self.store.root)
        for text in notices:
            self._notify(stage.id, text)
        entry = Entry(
            key=key.digest,
            kind=stage.kind,
            parts=key.parts,
            inputs={port: tuple(item.digest for item in items) for port, items in call.inputs.items()},
            outputs=stored,
            metrics=self.stage_output.metrics,
            notices=tuple(self.stage_output.notices),
            seconds=time.perf_counter() - start,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            environment=describe_environment(),
            machine=host.fingerprint() if stage.stage.per_machine else "",
            dependencies=dependencies,
            files=files,
        )
        self.store.put_entry(entry)
        self.store.drop_scratch(key.digest)
        return entry

    def _store_outputs(self, stage: PlannedStage, outputs: Mapping[str, Artifact | Path]) -> dict[str, StoredObject]:
        """Store what a launcher returned: artifacts, or folders that another process saved them to."""
        types = {port.name: port.type for port in stage.stage.outputs}
        if not isinstance(outputs, Mapping) or outputs.keys() != types.keys():
            raise TypeError(f"{stage.kind} has the outputs {', '.join(types)}; ptpipe_launch returned {outputs!r}")
        stored = {}
        for name, type_ in types.items():
            if not isinstance(output := outputs[name], type_ | Path):
                raise TypeError(f"{stage.kind} has {name}: {type_.__name__}; ptpipe_launch returned {output!r:.80}")
            stored[name] = self.store.adopt(output, type_) if isinstance(output, Path) else self.store.put(output)
            if issubclass(type_, Verdict):  # what decides how the run ends is read from the summary
                decisive = self.store.get(stored[name].digest, type_).judgement()
                if not decisive.items() <= dict(stored[name].summary).items():
                    raise TypeError(f"{stored[name].type}.summary() omits the verdict's own")
        return stored

    def _rebuild_inputs(self, stage: PlannedStage) -> None:
        """Rerun stages above whose stored outputs were altered since."""
        for reference in (reference for references in stage.wiring.values() for reference in references):
            name = reference.stage
            entry = self.entries[name]
            assert entry is not None, f"{stage.id} started without {name}"
            try:
                self.store.verify(entry.outputs[reference.output].digest)
            except IntegrityError:
                output, self.stage_output = self.stage_output, StageOutput()
                try:
                    self.entries[name] = self._result(self.plan[name], {reference.output})[0]
                    self._place_deliverables(self.plan[name])
                finally:
                    output.asides += self.stage_output.asides
                    self.stage_output = output

    def _place_deliverables(self, stage: PlannedStage) -> tuple[Path, ...]:
        """Place the files to ship in the run's folder; a failure is a notice, as the result itself is stored."""
        entry, folder = self.entries[stage.id], self.record.folder / stage.id
        try:
            placed = place_deliverables(self.store, stage.stage.outputs, entry, folder) if entry else {}
            write_statements(self.record, stage.id, self.entries, placed)
            return tuple(placed)
        except Exception as error:  # noqa: BLE001  # a full disk; a plugin's `deliverables` may raise anything
            self._notify(stage.id, f"the deliverables could not be placed in {folder}: {cause(error)}")
            return ()

    def _origin(self, stage: PlannedStage) -> str:
        """Return a digest of the modules and files that the stage's inputs depend on, and that no key has."""
        above = {reference.stage for references in stage.wiring.values() for reference in references}
        parts = {
            name: [dict(entry.dependencies), listed_digests(entry.files)]
            for name in above
            if (entry := self.entries[name]) and (entry.dependencies or entry.files)
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest() if parts else ""

    def _call(self, stage: PlannedStage) -> Call:
        digests = {
            port: [self._output(reference.stage, reference.output) for reference in references]
            for port, references in stage.wiring.items()
        }
        return make_call(self.plan, stage, self.keys[stage.id].digest, digests, self.store, self.options.nodes)

    def _output(self, stage_id: str, output: str) -> str:
        entry = self.entries[stage_id]
        assert entry is not None, stage_id
        return entry.outputs[output].digest

    def _skip_rest(self, message: str) -> None:
        finished = {event.stage_id for event in self.finished}
        for stage in self.plan.stages:
            if stage.id not in finished:
                self._finish(stage, Outcome.SKIPPED, message=message)

    def _finish(self, stage: PlannedStage, outcome: Outcome, entry: Entry | None = None, **facts: Any) -> None:
        """Record and report a stage's end; `facts`: further fields of StageFinished."""
        result: dict[str, Any] = {"metrics": dict(self.stage_output.metrics)}
        notices = tuple(self.stage_output.notices)
        with signals_deferred():  # so that every reporter hears of the end, and once
            if entry:
                outputs = {name: asdict(stored) for name, stored in entry.outputs.items()}
                result = {"metrics": entry.metrics, "outputs": outputs}
                result |= {"made_at": entry.made_at, "machine": entry.machine}
                result |= {"environment": entry.environment, "files": listed_digests(entry.files)}
                result["deliverables"], notices = self._place_deliverables(stage), entry.notices
            event = StageFinished(
                stage_id=stage.id,
                kind=stage.kind,
                outcome=outcome,
                key=self.keys[stage.id].digest,
                notices=(*notices, *self.stage_output.asides),
                **result,
                **{"seconds": 0.0, **facts},
            )
            self.stage_output = StageOutput()
            self.finished.append(event)
            if outcome is not Outcome.CACHED:
                self.record.write(self.finished, self.exit_code)
            self.reporters.stage_finished(event)

    def _on_event(self, event: Event) -> None:
        """Pass a stage's event on to the reporters, and keep what belongs to its result."""
        self.stage_output.keep(event)
        match event:
            case LogLine():
                self.record.log(event)
            case Attachment():
                self.record.attach(event)
        if not isinstance(event, ModulesImported | FilesRead):  # of no use to a user
            self.reporters.event(event)

    def _notify(self, stage_id: str, text: str) -> None:
        """Give a notice of this run: not part of the stage's result, so not repeated when that is cached."""
        self.stage_output.asides.append(text)
        self.record.log(LogLine(stage_id, text))
        self.reporters.event(Notice(stage_id, text))


def _severity(code: ExitCode) -> int:
    """Rank exit codes: of several, the most severe is the run's."""
    order = (ExitCode.DONE, ExitCode.UNDECIDED, ExitCode.REFUSED, ExitCode.FAILED, ExitCode.INTEGRITY)
    return order.index(code)


def _exit_code(error: BaseException) -> ExitCode:
    return ExitCode.INTEGRITY if isinstance(error, IntegrityError) else ExitCode.FAILED
