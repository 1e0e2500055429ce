"""The command line's `run` and `plan` for Python: `ptpipe.run("m.yaml", {"finetune.lr": 0.001})`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from ptpipe.artifact import JSON, Artifact, Verdict
from ptpipe.errors import ExitCode, Problem, UsageError, nearest
from ptpipe.events import Event, StageFinished
from ptpipe.execution.engine import RunOptions, execute, source_digests
from ptpipe.execution.process_state import process_state_restored
from ptpipe.manifest.manifest import from_content, load
from ptpipe.plan.bind import Plan, bind
from ptpipe.plan.cache_status import CacheStatus, cache_statuses
from ptpipe.plan.hints import same_name_hint
from ptpipe.plan.keys import compute_keys
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe.reporter import Reporter
from ptpipe.stages import Port
from ptpipe.store.store import Store

DEFAULT_ARTIFACTS = Path("artifacts")
_NO_PLUGIN = "no loaded plugin runs a manifest on several nodes"
ArtifactT = TypeVar("ArtifactT", bound=Artifact)


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and access to its artifacts."""

    run_id: str
    exit_code: ExitCode
    seconds: float
    """Wall time."""
    folder: Path
    """The run's record, log and reports."""
    stages: Mapping[str, StageFinished] = field(repr=False)  # a notebook shows a result, which is to be short
    """By stage id, in run order."""
    plan: Plan = field(repr=False)
    store: Store = field(repr=False)

    @property
    def metrics(self) -> dict[str, Mapping[str, JSON]]:
        """The metrics of each stage by name, by stage id: `result.metrics["compare"]["onnx.accuracy"]`."""
        return {stage_id: event.metrics for stage_id, event in self.stages.items()}

    def verdicts(self, gate: str) -> tuple[Verdict, ...]:
        """Return what the stage `gate` decided, and why: mostly one verdict; none where it failed or was skipped.

        Raises ValueError where the manifest has no gate of that name.
        """
        if gate not in self._gates:
            message = f"{self.plan.manifest.path} has no gate {gate!r}, but {', '.join(self._gates) or 'none'}"
            raise ValueError(str(Problem(message, suggestion=nearest(gate, self._gates))))
        ports = [port.name for port in self._gates[gate] if port.name in self.stages[gate].outputs]
        return tuple(cast(Verdict, self.artifact(gate, name)) for name in ports)

    @property
    def _gates(self) -> dict[str, list[Port]]:
        """The outputs that are verdicts, of each stage that has any."""
        ports = {
            stage.id: [port for port in stage.stage.outputs if issubclass(port.type, Verdict)]
            for stage in self.plan.stages
        }
        return {name: verdicts for name, verdicts in ports.items() if verdicts}

    @overload
    def artifact(self, stage_id: str, output: str | None = None) -> Artifact: ...

    @overload
    def artifact(self, stage_id: str, output: str | None = None, *, type: type[ArtifactT]) -> ArtifactT: ...

    def artifact(self, stage_id: str, output: str | None = None, *, type: type[Artifact] = Artifact) -> Artifact:
        """Load a stage's output from the store.

        `stage_id`: as in the manifest. `output`: its name; may be left out if the stage has only one. `type`: the class
        that the caller takes it for, which type checkers then know.
        Raises KeyError if the stage does not exist or produced no such output, TypeError if it is not of that class,
        IntegrityError if the stored bytes were altered.
        """
        outputs = self.stages[stage_id].outputs
        name = output or next(iter(outputs), "")
        if output is None and len(outputs) != 1:
            raise KeyError(f"{stage_id} has outputs {', '.join(outputs) or 'none'}: name one")
        types = {port.name: port.type for port in self.plan[stage_id].stage.outputs}
        if not issubclass(types[name], type):
            hint = same_name_hint(type, [types[name]])
            raise TypeError(f"{name} of {stage_id} is a {types[name].__name__}, not a {type.__name__}{hint}")
        with self.plan.vocabulary.importable():
            artifact = self.store.get(str(outputs[name]["digest"]), types[name])
            return artifact.with_source_functions(self.plan.source_functions[stage_id])


def load_plan(manifest: Path | str | Plan | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Plan:
    """Read a manifest, apply overrides and bind it to the loaded plugins. Runs no stage, writes nothing.

    The plugins that the manifest names are loaded, which executes their code; the calling process is left as `run`
    leaves it.

    `manifest`: the YAML file, or its content as a program composes it (`{"version": 1, "stages": {...}}`; files of
    plugins are relative to the working directory), or a plan to bind again with further overrides. `overrides`: values
    by `"stage.option"` (nested options: `"stage.option.name"`) or `"seed"`.
    Raises ManifestError with every problem at once.
    """
    with process_state_restored():
        return bound_plan(manifest, overrides)


def bound_plan(manifest: Path | str | Plan | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Plan:
    """Do as `load_plan`, and leave the folders of plugins on the path, where these find the files beside them."""
    if isinstance(manifest, Plan):
        return bind(manifest.manifest.overridden_by(overrides), manifest.vocabulary) if overrides else manifest
    read = from_content(manifest, Path()) if isinstance(manifest, Mapping) else load(Path(manifest))
    loaded = read.overridden_by(overrides or {})
    places = [loaded.locate("plugins", position) for position in range(len(loaded.plugins))]
    return bind(loaded, load_vocabulary(loaded.plugins, loaded.path.parent, places))


def cache_status(
    plan: Plan, *, artifacts: Path | str = DEFAULT_ARTIFACTS, fresh: Collection[str] = ()
) -> list[CacheStatus]:
    """Return for each stage the stored result that a run would use, or why it would run the stage.

    No stage runs. `artifacts`: the artifacts folder. `fresh`: as in `RunOptions`. Raises ManifestError where a name in
    `fresh` is no stage's.
    """
    store = Store(Path(artifacts))
    with process_state_restored(), plan.vocabulary.importable():
        sources = source_digests(plan, store)
        statuses = cache_statuses(plan, compute_keys(plan, sources), store, sources, fresh)
        sources.save()
    return statuses


def run(
    manifest: Path | str | Plan | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    artifacts: Path | str = DEFAULT_ARTIFACTS,
    options: RunOptions = RunOptions(),  # noqa: B008  # frozen
    reporters: Sequence[Reporter] = (),
) -> RunResult:
    """Run a manifest or a plan, as `ptpipe run` does.

    `manifest`, `overrides`: as for `load_plan`. `artifacts`: the folder that keeps results and runs; created if
    missing. `options`: the command line's. `reporters`: notified besides those of the plugins.
    Raises ManifestError before any stage runs if the manifest is wrong, PtpipeError if the artifacts folder can't be
    used. A failing stage or a refusing gate raises nothing: check `exit_code` and `stages` of the result. The calling
    process is left as it was: `sys.path`, environment, working directory, locale, signal handlers, garbage collector.
    Meanwhile it is changed, so UsageError is raised where another thread of it is in `run`, `load_plan` or
    `cache_status`: run one after the other, or each in a process of its own.
    """
    if options.nodes.rank:
        raise UsageError(f"node {options.nodes.rank} joins the run of node 0: call ptpipe.api.join_run")
    with process_state_restored():
        plan = bound_plan(manifest, overrides)
        store = Store(Path(artifacts))
        run_here = partial(execute, plan, store, options, reporters)
        hook = plan.vocabulary.manager.hook
        is_single = options.nodes.num == 1
        with plan.vocabulary.importable():  # of a plan that was loaded before
            ended = run_here() if is_single else hook.ptpipe_run_on_nodes(plan=plan, store=store, run=run_here)
    if ended is None:
        raise UsageError(_NO_PLUGIN)
    stages = {event.stage_id: event for event in ended.stages}
    return RunResult(ended.run_id, ExitCode(ended.exit_code), ended.seconds, ended.folder, stages, plan, store)


def join_run(
    manifest: Path | str | Plan,
    overrides: Mapping[str, Any] | None = None,
    *,
    artifacts: Path | str = DEFAULT_ARTIFACTS,
    options: RunOptions,
    tell: Callable[[Event], None] = lambda event: None,
) -> ExitCode:
    """Take part in the run of the same manifest on node 0, as another node; return the exit code of that run.

    `manifest`, `overrides`, `artifacts`: the same as on node 0. `options.nodes`: all nodes and the rank of this one.
    `tell`: receives events for this node's user.
    Raises ManifestError if the manifest is wrong, StageError if node 0 does not start or disappears.
    """
    plan = bound_plan(manifest, overrides)
    store, hook = Store(Path(artifacts)), plan.vocabulary.manager.hook
    ended: ExitCode | None = hook.ptpipe_join_run(
        plan=plan, store=store, nodes=options.nodes, fresh=options.fresh, tell=tell
    )
    if ended is None:
        raise UsageError(_NO_PLUGIN)
    return ended
