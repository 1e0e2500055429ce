"""`ptpipe runs`: list past runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptpipe.cli.common import artifacts_option, counted, describe_end, echo, open_store, print_json
from ptpipe.cli.record_facts import options, primary_metrics, verdicts
from ptpipe.cli.rows import Cell, Row, print_rows, sorted_rows, table_options
from ptpipe.errors import Problem, PtpipeError, UsageError, nearest

if TYPE_CHECKING:
    from ptpipe.store.runs import Run

_ALWAYS = ("run", "took", "ended", "stages", "started (UTC)")


@click.command()
@artifacts_option
@click.option("--name", help="Only runs of this manifest name.")
@click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(min=0),
    help="How many runs to list, the newest; 0 lists all.",
)
@table_options
def runs(artifacts: Path, name: str | None, limit: int, sort_by: str | None, table_format: str | None) -> None:
    """List the runs in the artifacts folder, newest first.

    Overrides, the primary metric of every model that a run compared (`onnx.accuracy`) and the verdicts of gates have
    columns of their own, as far as they differ. A run whose record cannot be read is listed with the reason.
    """
    found = _runs(artifacts, name)
    listed = [_facts(run) for run in found[: limit or None]]
    by_id = {facts["run_id"]: facts for facts in listed}
    overridden = dict.fromkeys(name for facts in listed for name in facts.get("overrides", ()))
    rows = sorted_rows([_row(facts, overridden) for facts in listed], sort_by) if listed else []
    if table_format == "json":
        print_json([_as_json(by_id[row["run"].text]) for row in rows])
    elif listed or table_format:
        left = len(found) - len(listed)
        notes = [f"and {counted(left, 'older run')}: --limit 0 lists all"] if left else []
        print_rows(rows, _ALWAYS, table_format, f"Runs in {artifacts}", notes)
    else:
        echo(f"no runs under {artifacts}")


def _runs(artifacts: Path, name: str | None) -> Sequence[Run]:
    """Return the runs of a manifest name, or all. Raises UsageError where other names alone have runs."""
    from ptpipe.store.runs import list_runs

    store = open_store(artifacts)
    found = list_runs(store, name)
    if name is not None and not found and (names := {run.name for run in list_runs(store)}):
        problem = Problem(f"no run under {artifacts} has the name {name!r}", suggestion=nearest(name, sorted(names)))
        raise UsageError(str(problem))
    return found


def _facts(run: Run) -> dict[str, Any]:
    """Return a run's record, or what is known of a run without one that can be read."""
    from ptpipe.store.runs import read_record

    try:
        return read_record(run.folder)
    except PtpipeError as error:
        return {"run_id": run.id, "name": run.name, "error": str(error)}


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in facts:
        return dict(facts)
    decisions = {stage_id: verdict["decision"] for stage_id, verdict in verdicts(facts).items()}
    kept = {key: value for key, value in facts.items() if key != "stages"}
    return {**kept, "metrics": primary_metrics(facts), "verdicts": decisions}


def _row(facts: Mapping[str, Any], overridden: Iterable[str]) -> Row:
    """Return the cells of a run. `overridden`: options that any of the runs overrides: those of the others differ."""
    if "error" in facts:
        words = (facts["run_id"], None, "unreadable", facts["error"], None)
        return {name: Cell.of(word) for name, word in zip(_ALWAYS, words, strict=True)}
    counts = Counter(stage["outcome"] for stage in facts["stages"])
    cells = {
        "run": Cell.of(facts["run_id"]),
        "took": Cell(facts["seconds"], f"{facts['seconds']:.1f} s"),
        "ended": Cell.of(describe_end(facts)),
    }
    cells |= {f"{stage_id} verdict": Cell.of(of["decision"]) for stage_id, of in verdicts(facts).items()}
    cells |= {name: Cell.of(value) for name, value in primary_metrics(facts).items()}
    values = {**facts["overrides"], **options(facts)}
    cells |= {name: Cell.of(values.get(name)) for name in overridden if name not in cells}
    return (
        cells
        | {  # last, as a narrow terminal shows the first columns: the id has the time
            "stages": Cell.of(", ".join(f"{number} {outcome}" for outcome, number in counts.items())),
            "started (UTC)": Cell.of(facts["started_at"][:19].replace("T", " ")),
        }
    )
