"""The command `ptpipe stage-times`: how long each stage of a run took."""

from __future__ import annotations

from pathlib import Path

import click

from ptpipe.commands import (
    artifacts_option,
    find_run,
    json_option,
    open_store,
    print_json,
    print_table,
    stdout_for_results,
)


@click.command()
@click.argument("run", default="last")
@artifacts_option
@json_option
@stdout_for_results()
def stage_times(run: str, artifacts: Path, as_json: bool) -> None:
    """Print how long each stage of a run took."""
    record, _folder = find_run(open_store(artifacts), run)
    times_s = {stage["stage_id"]: stage["seconds"] for stage in record["stages"]}
    if as_json:
        print_json(times_s)
    else:
        print_table(("stage", "seconds"), [(stage_id, f"{time_s:.1f}") for stage_id, time_s in times_s.items()])
