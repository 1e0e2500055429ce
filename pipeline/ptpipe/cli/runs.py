"""`ptpipe runs`: list past runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptpipe.cli.common import artifacts_option, counted, describe_end, json_option, open_store, print_json, print_table
from ptpipe.errors import PtpipeError

if TYPE_CHECKING:
    from ptpipe.store.runs import Run


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
@json_option
def runs(artifacts: Path, name: str | None, limit: int, as_json: bool) -> None:
    """List the runs in the artifacts folder, newest first.

    A run whose record cannot be read is listed with the reason.
    """
    from ptpipe.store.runs import list_runs

    found = list_runs(open_store(artifacts), name)
    listed = [_facts(run) for run in found[: limit or None]]
    if as_json:
        print_json([{key: value for key, value in facts.items() if key != "stages"} for facts in listed])
    elif listed:
        print_table(("run", "started (UTC)", "took", "ended", "stages"), map(_row, listed))
        if left := len(found) - len(listed):
            click.echo(f"and {counted(left, 'older run')}: --limit 0 lists all")
    else:
        click.echo(f"no runs under {artifacts}")


def _facts(run: Run) -> dict[str, Any]:
    """Return a run's record, or what is known of a run without one that can be read."""
    from ptpipe.store.runs import read_record

    try:
        return read_record(run.folder)
    except PtpipeError as error:
        return {"run_id": run.id, "name": run.name, "error": str(error)}


def _row(facts: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in facts:
        return (facts["run_id"], "", "", "unreadable", facts["error"])
    started = facts["started_at"][:19].replace("T", " ")
    counts = Counter(stage["outcome"] for stage in facts["stages"])
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    return (facts["run_id"], started, f"{facts['seconds']:.1f} s", describe_end(facts), outcomes)
