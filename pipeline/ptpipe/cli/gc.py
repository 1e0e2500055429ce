"""`ptpipe gc`: delete old runs and their results."""

from __future__ import annotations

from pathlib import Path

import click

from ptpipe.cli.common import artifacts_option, counted, echo, json_option, open_store, print_json


@click.command()
@artifacts_option
@click.option(
    "--keep-runs",
    default=10,
    show_default=True,
    type=click.IntRange(min=0),
    help="Newest runs to keep, per manifest name.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@json_option
def gc(artifacts: Path, keep_runs: int, dry_run: bool, as_json: bool) -> None:
    """Delete old runs with their deliverables, and every stored result that only they used."""
    from ptpipe.execution.gc import collect_garbage

    garbage = collect_garbage(open_store(artifacts), keep_runs, dry_run)
    if as_json:
        print_json({**vars(garbage), "dry_run": dry_run})
        return
    deleted = "would delete" if dry_run else "deleted"
    size = f"{garbage.size_bytes / 1e6:.1f} MB"
    runs, objects = counted(garbage.num_runs, "run"), counted(garbage.num_objects, "stored object")
    echo(f"{deleted} {runs} and {objects}, {size} in all")
