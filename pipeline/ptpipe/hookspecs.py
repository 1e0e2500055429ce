"""Every hook that a plugin can implement. This file is the reference; `pipeline/README.md` has its table.

A plugin implements a hook by defining a function of the same name, marked with `ptpipe.hookimpl`, at the top of its
module. It may leave out parameters that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from ptpipe.artifact import JSON, Artifact
    from ptpipe.check import Check
    from ptpipe.errors import ExitCode, Problem
    from ptpipe.events import Event, RunFinished
    from ptpipe.execution.call import Call, Nodes
    from ptpipe.plan.bind import Plan
    from ptpipe.reporter import Reporter
    from ptpipe.sections import Section
    from ptpipe.stages import Stage
    from ptpipe.store.store import Store

hookspec = pluggy.HookspecMarker("ptpipe")
hookimpl = pluggy.HookimplMarker("ptpipe")


@hookspec
def ptpipe_stages() -> Iterable[Stage[..., object]]:  # type: ignore[empty-body]  # a specification has none
    """Return the stage kinds that this plugin offers.

    Optional: without it, a plugin offers every `@stage` function defined in its module. Called when plugins are
    loaded, in the main process and in each worker; all results are collected.
    """


@hookspec
def ptpipe_reporters() -> Iterable[Reporter]:  # type: ignore[empty-body]
    """Return new reporters for one run.

    Called once per run, in the main process only; all results are collected.
    """


@hookspec
def ptpipe_report_sections(  # type: ignore[empty-body]
    plan: Plan, run: RunFinished, load: Callable[[str, str], Artifact]
) -> Iterable[Section]:
    """Return sections for the reports of a run, as data: see `ptpipe.sections`.

    Called once, when the run has ended, however it ended, before reporters hear of it: in the main process, also
    where all stages were cached. `run`: how it ended. `load(stage_id, output)`: a stage's stored output. A hook
    that raises gives the report no sections, and a notice; it changes neither the outcome of the run nor its exit
    code. All results are collected.
    """


@hookspec
def ptpipe_check(plan: Plan) -> Iterable[Problem]:  # type: ignore[empty-body]
    """Check a bound plan before any stage runs, and return its problems: rules across stages, house policies.

    `plan`: stages in run order with validated options, without those that are wrong or need such; `plan.problem(...)`
    makes a located problem, which stops the run, or with `severity="warning"` does not. All results are collected.
    """


@hookspec
def ptpipe_check_results(  # type: ignore[empty-body]
    plan: Plan, summaries: Mapping[str, Mapping[str, Mapping[str, JSON]]]
) -> Iterable[Problem]:
    """Check a bound plan in view of stored results, for `ptpipe plan` and before a run's first stage.

    `summaries`: `Artifact.summary()` of each output by stage id and output name, of the stages that a run would find
    cached. What needs no results belongs into `ptpipe_check`. All results are collected.
    """


@hookspec
def ptpipe_doctor(workers: int) -> Iterable[Check]:  # type: ignore[empty-body]
    """Check what this plugin needs from the installation and the machine, for `ptpipe doctor`.

    `workers`: how many processes to start as a trial of parallel training, 0 for none. Report what was tried rather
    than what should work, and leave nothing behind. May import torch; main process only; all results are collected.
    """


@hookspec(firstresult=True)
def ptpipe_launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Artifact | Path] | None:
    """Execute one stage and return its outputs by name, or None to leave it to the next launcher.

    `call`: the stage, its options and inputs, as JSON that any process can read. `tell`: receives the stage's events
    while it runs. An output may be a folder that another process saved the artifact to: it is moved into the store. The
    first result counts; the default launcher, which is asked last, runs the stage in this process. Raise StageError for
    a failure that the user can act on.
    """


@hookspec(firstresult=True)
def ptpipe_nodes() -> Nodes | None:
    """Return the nodes that this process's environment describes, or None.

    Called by `ptpipe run` without --nnodes; the first result counts.
    """


@hookspec(firstresult=True)
def ptpipe_run_on_nodes(plan: Plan, store: Store, run: Callable[[], RunFinished]) -> RunFinished | None:
    """Run a plan as node 0 of several nodes: call `run()` and return its result, or None to leave it to the next.

    `store`: the artifacts folder, shared by all nodes. `run`: runs the plan in this process. Make the other nodes
    take part in each call with several workers, and tell them when the run has ended. The first result counts.
    """


@hookspec(firstresult=True)
def ptpipe_join_run(
    plan: Plan, store: Store, nodes: Nodes, fresh: tuple[str, ...], tell: Callable[[Event], None]
) -> ExitCode | None:
    """Take part in a run of the same plan on node 0 until it ends; return its exit code, or None to leave it.

    `store`: the artifacts folder, shared by all nodes. `nodes`: all nodes and the rank of this one. `fresh`: the stages
    that run although their results are stored. `tell`: receives events for this node's user. The first result
    counts. Raise StageError if node 0 does not start or disappears.
    """
