"""`ptpipe reproduce`: run something again, and compare."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import FiniteFloatRange, artifacts_option, echo, json_option, open_store, print_json, print_table
from ptpipe.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ptpipe.provenance.reproduce import PastRun, Reproduction
    from ptpipe.store.store import Store


@click.command()
@click.argument("target", metavar="RUN|FILE")
@click.option(
    "--tolerance",
    type=FiniteFloatRange(0),
    help="Accept other bytes where each metric differs by no more, absolutely or relative to the larger.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="What the manifest's plugin files are relative to: for a RUN its manifest's folder, for a FILE this one.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="A new or empty artifacts folder to run in, and to keep. Otherwise a temporary one.",
)
@artifacts_option
@json_option
def reproduce(  # one parameter an option
    target: str, tolerance: float | None, folder: Path | None, work: Path | None, artifacts: Path, as_json: bool
) -> int:
    """Run again what a run or a deliverable came from, in an empty artifacts folder, and compare stage by stage.

    RUN is a run's id, the unambiguous start or end of one, or `last`. FILE is a deliverable with its statement beside
    it (FILE.intoto.json), which has the manifest's text: nothing else of the first run is needed. Plugins that the
    manifest names are loaded, and stages read the files that it names, as in `ptpipe run`.

    Each stage is bit-equal (the same bytes), within tolerance (other bytes, close metrics), measured (it measures the
    machine, or depends on such a stage), different, or not run. The first cause is the first stage that is none of
    bit-equal and measured, with what changed in its key and environment.

    The exit code is 0 if every stage is bit-equal, within tolerance or measured, else 1.
    """
    from ptpipe.provenance.reproduce import reproduce

    past = _past(target, open_store(artifacts))
    if folder is not None:
        past = replace(past, path=folder / past.path.name)
    if work is not None and work.is_dir() and any(work.iterdir()):
        raise UsageError(f"{work} is not empty: what is stored there would be compared instead of a new result")
    plan = past.plan()
    with contextlib.ExitStack() as stack:
        place = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ptpipe-")))
        result = reproduce(past, plan, place, tolerance)
    if work is None:  # the run has named files there
        echo(f"{place} was temporary and is deleted; --work FOLDER keeps what is run again", err=True)
    _show(past, result, as_json)
    if result.exit_code.is_interrupted:
        return int(result.exit_code)
    return int(ExitCode.DONE if result.is_complete else ExitCode.FAILED)


def _past(target: str, store: Store) -> PastRun:
    from ptpipe.execution.statement import SUFFIX, statement_path
    from ptpipe.plan.module_files import is_file
    from ptpipe.provenance.reproduce import past_run, past_statement
    from ptpipe.provenance.statement import Statement

    path = Path(target) if target.endswith(SUFFIX) else statement_path(Path(target))
    if is_file(path):
        return past_statement(Statement.read(path), target)
    return past_run(store, target)


def _show(past: PastRun, result: Reproduction, as_json: bool) -> None:
    cause = result.first_cause
    if as_json:
        stages = [asdict(stage) for stage in result.stages]
        first = cause and cause.stage_id
        print_json({"of": past.name, "reproduced": result.is_complete, "first_cause": first, "stages": stages})
        return
    print_table(("stage", "kind", "result"), [(stage.stage_id, stage.kind, stage.status) for stage in result.stages])
    if cause is not None:
        changes = "; ".join(cause.changes) or _UNKNOWN
        echo(f"first cause: {cause.stage_id} is {cause.status}: {changes}")
    echo(f"{past.name} was {'' if result.is_complete else 'not '}reproduced")


_UNKNOWN = (
    "its key and environment are the same, so it is not deterministic, or reads something that its key leaves out"
)
