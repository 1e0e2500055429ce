"""What the command line does, for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptpipe.artifact import JSON, Artifact
from ptpipe.errors import ExitCode, UsageError
from ptpipe.events import Event, StageFinished
from ptpipe.execution.engine import RunOptions, execute
from ptpipe.execution.process_state import process_state_restored
from ptpipe.manifest.manifest import load
from ptpipe.nodes import Follower
from ptpipe.plan.bind import Plan, bind
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe.reporter import Reporter
from ptpipe.store.store import Store

DEFAULT_ARTIFACTS = Path("artifacts")


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and a way to its artifacts."""

    run_id: str
    exit_code: ExitCode
    seconds: float
    folder: Path
    """The run's record, log and reports."""
    stages: Mapping[str, StageFinished]
    plan: Plan
    store: Store

    def artifact(self, stage_id: str, output: str | None = None) -> Artifact:
        """Read a stage's output; `output` may be left out where there is one only.

        Raises KeyError for a stage or output that isn't there (or wasn't made), IntegrityError for altered bytes.
        """
        outputs = self.stages[stage_id].outputs
        name = output or next(iter(outputs), "")
        if output is None and len(outputs) != 1:
            raise KeyError(f"{stage_id} has outputs {', '.join(outputs) or 'none'}: name one")
        types = {port.name: port.type for port in self.plan[stage_id].stage.outputs}
        with self.plan.vocabulary.importable():
            return self.store.get(str(outputs[name]["digest"]), types[name])


def load_plan(manifest: Path | str, overrides: Mapping[str, JSON] | None = None) -> Plan:
    """Read, override and bind a manifest. Raises ManifestError with every problem at once; writes nothing."""
    path = Path(manifest)
    loaded = load(path).overridden_by(overrides or {})
    return bind(loaded, load_vocabulary(loaded.plugins, path.parent))


def run(
    manifest: Path | str,
    overrides: Mapping[str, JSON] | None = None,
    *,
    artifacts: Path | str = DEFAULT_ARTIFACTS,
    options: RunOptions = RunOptions(),  # noqa: B008  # frozen
    reporters: Sequence[Reporter] = (),
) -> RunResult:
    """Run a manifest, as `ptpipe run` does: `run("m.yaml", {"finetune.lr": 0.001}).exit_code`.

    Raises ManifestError before any work where the manifest is wrong, PtpipeError where the artifacts folder can't be
    used. A failing stage or a refusing gate raises nothing: look at `exit_code` and `stages`. The calling process is
    left as it was: `sys.path`, environment, working directory, signal handlers, garbage collector.
    """
    if options.nodes.rank:
        raise UsageError(f"node {options.nodes.rank} follows node 0: call follow")
    with process_state_restored():
        plan = load_plan(manifest, overrides)
        store = Store(Path(artifacts))
        ended = execute(plan, store, options, reporters)
    stages = {event.stage_id: event for event in ended.stages}
    return RunResult(ended.run_id, ExitCode(ended.exit_code), ended.seconds, ended.folder, stages, plan, store)


def follow(
    manifest: Path | str,
    overrides: Mapping[str, JSON] | None = None,
    *,
    artifacts: Path | str = DEFAULT_ARTIFACTS,
    options: RunOptions,
    tell: Callable[[Event], None] = lambda event: None,
) -> ExitCode:
    """Take part in the run of the same manifest that node 0 leads, as one of the other nodes; how it ended.

    Raises ManifestError where the manifest is wrong, StageError where node 0 doesn't come or goes without a word.
    """
    plan, store = load_plan(manifest, overrides), Store(Path(artifacts))
    store.open_for_writing()
    with store.in_use():
        return Follower(plan, store, options.nodes, tell).follow()
