"""`ptpipe run`."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptpipe.cli.common import artifacts_option, echo, json_option, manifest_argument, print_json, read_plan, set_option
from ptpipe.errors import PtpipeError, UsageError
from ptpipe.events import Event, LogLine, Notice, RunFinished, RunStarted, StageStarted
from ptpipe.reporter import Reporter

if TYPE_CHECKING:
    from ptpipe.execution.call import Nodes
    from ptpipe.plan.bind import Plan


class _FreezeImports(Reporter):
    """Exempts imported objects from garbage collection: right for a process of our own, not for a caller of `run()`.

    Most are imported by stages. Stages that build networks collect garbage several times, and each collection would
    traverse half a million objects of torch and onnx.
    """

    def run_started(self, event: RunStarted) -> None:
        gc.freeze()

    def stage_started(self, event: StageStarted) -> None:
        gc.collect()  # what is garbage now would stay
        gc.freeze()


class _ReadRecord(Reporter):
    """Reads the run's record while the run still holds the store: afterwards `ptpipe gc` may delete it."""

    record: Mapping[str, Any] | None = None
    problem: PtpipeError | None = None

    def run_finished(self, event: RunFinished) -> None:
        from ptpipe.store.runs import read_record

        try:
            self.record = read_record(event.folder)
        except PtpipeError as error:
            self.problem = error


@click.command()
@manifest_argument
@set_option
@artifacts_option
@click.option("--fresh", multiple=True, metavar="STAGE", help="Run this stage again although its result is stored.")
@click.option("--keep-going", is_flag=True, help="After a failure, still run the stages that do not depend on it.")
@click.option("-v", "--verbose", is_flag=True, help="Show the stages' log lines.")
@click.option("-q", "--quiet", is_flag=True, help="Show only problems and the end.")
@click.option("--nnodes", type=click.IntRange(1, 4096), default=1, help="Machines that run this manifest together.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="The rank of this machine; node 0 reports.")
@click.option(
    "--rdzv-endpoint", metavar="HOST:PORT", default="", help="Where the machines meet: a free port of node 0."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0, 1000),
    default=0,
    help="How often a stage's workers are restarted from their last checkpoint after one has failed.",
)
@json_option
def run(  # noqa: PLR0913  # one parameter an option
    manifest: Path,
    settings: tuple[str, ...],
    artifacts: Path,
    fresh: tuple[str, ...],
    keep_going: bool,
    verbose: bool,
    quiet: bool,
    nnodes: int,
    node_rank: int,
    rdzv_endpoint: str,
    max_restarts: int,
    as_json: bool,
) -> int:
    """Run a manifest: execute what is new, take the rest from the store.

    Running again is resuming: finished stages are cached, and an interrupted training continues from its last
    checkpoint. The exit code is 3 if a gate refused, and 4 if one could not decide and is configured to fail then.

    Stages with several workers can use several machines that share the artifacts folder: start the same command on
    each, with --nnodes, --node-rank and --rdzv-endpoint. Under a cluster's own launcher leave these out: the ranks are
    taken from the environment.
    """
    from ptpipe import api
    from ptpipe.execution.engine import RunOptions

    nodes = _nodes(nnodes, node_rank, rdzv_endpoint, max_restarts)
    plan = read_plan(manifest, settings)
    if nodes.num == 1:
        nodes = _nodes_of_environment(plan) or nodes
    options = RunOptions(fresh, keep_going, verbosity=int(verbose) - int(quiet), nodes=nodes)
    if nodes.rank:
        return int(api.join_run(plan, artifacts=artifacts, options=options, tell=_echo))
    ending = _ReadRecord()
    reporters = (_FreezeImports(), ending) if as_json else (_FreezeImports(),)
    result = api.run(plan, artifacts=artifacts, options=options, reporters=reporters)
    if as_json:
        if ending.problem is not None:
            raise ending.problem
        if ending.record is None or not ending.record["finished"]:  # that of an earlier moment would be misleading
            raise PtpipeError(f"the record of the run cannot be written: {result.folder}")
        print_json(ending.record)
    return int(result.exit_code)


def _nodes(num: int, rank: int, endpoint: str, max_restarts: int) -> Nodes:
    """The nodes that the options describe. Raises UsageError if they contradict each other."""
    from ptpipe.execution.call import Nodes

    if num == 1 and (endpoint or rank):
        option = "--rdzv-endpoint" if endpoint else f"--node-rank {rank}"
        raise UsageError(f"{option} needs --nnodes, the number of machines")
    if num == 1:
        return Nodes(max_restarts=max_restarts)
    if rank >= num:
        raise UsageError(f"--node-rank {rank}: the ranks of --nnodes {num} machines are 0 to {num - 1}")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--nnodes {num} needs --rdzv-endpoint host:port, a free port of node 0, not {endpoint!r}")
    return Nodes(num, rank, endpoint, max_restarts)


def _nodes_of_environment(plan: Plan) -> Nodes | None:
    nodes: Nodes | None = plan.vocabulary.manager.hook.ptpipe_nodes()
    return nodes


def _echo(event: Event) -> None:
    """Show on stderr what a node other than node 0 reports; results and reports are node 0's."""
    if isinstance(event, LogLine | Notice) and not (isinstance(event, LogLine) and event.stage_id):
        echo(event.text, err=True)
