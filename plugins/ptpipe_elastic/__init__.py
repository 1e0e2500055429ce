"""Parallel stages on torch elastic: launch workers on one or several nodes; measure how training scales.

Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ptpipe import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from ptpipe import Call, Check, Event, ExitCode, Nodes, Plan, RunFinished, Store


@hookimpl
def ptpipe_launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path] | None:
    """Launch the workers of a parallel stage, unless the cluster has started them already."""
    if call.workers == 1 or call.nodes.started:
        return None
    from ptpipe_elastic.launch import launch

    return launch(call, tell)


@hookimpl
def ptpipe_nodes() -> Nodes | None:
    """Read the ranks that torchrun or SLURM set."""
    from ptpipe_elastic.nodes import nodes_of_environment

    return nodes_of_environment()


@hookimpl
def ptpipe_run_on_nodes(plan: Plan, store: Store, run: Callable[[], RunFinished]) -> RunFinished:
    """Lead: announce each parallel call to the other nodes."""
    from ptpipe_elastic.nodes import lead

    return lead(plan, store, run)


@hookimpl
def ptpipe_join_run(
    plan: Plan, store: Store, nodes: Nodes, fresh: tuple[str, ...], tell: Callable[[Event], None]
) -> ExitCode:
    """Follow node 0."""
    from ptpipe_elastic.nodes import follow

    return follow(plan, store, nodes, fresh, tell)


@hookimpl
def ptpipe_doctor(workers: int) -> Iterable[Check]:
    """Check torch.distributed; with `workers`, run collectives between that many processes."""
    from ptpipe_elastic.doctor import checks

    return checks(workers)
