"""`ptpipe gc`: delete old runs and their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ptpipe.cli.common import artifacts_option, counted, json_option, open_store, print_json
from ptpipe.errors import ExitCode

_MAX_LINES = 10


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
@click.option("--empty-quarantine", is_flag=True, help="Also delete the objects that failed verification.")
@json_option
def gc(artifacts: Path, keep_runs: int, dry_run: bool, empty_quarantine: bool, as_json: bool) -> int:
    """Delete old runs with their deliverables, and every stored result that only they used.

    What cannot be read or deleted, and what is not ptpipe's, is named and kept, with all that it may need; the exit
    code is 1 then.
    """
    from ptpipe.execution.gc import collect_garbage

    garbage = collect_garbage(open_store(artifacts), keep_runs, dry_run, empty_quarantine)
    exit_code = ExitCode.FAILED if garbage.problems else ExitCode.DONE
    if as_json:
        print_json({**vars(garbage), "dry_run": dry_run})
        return exit_code
    deleted = "would delete" if dry_run else "deleted"
    size = f"{garbage.size_bytes / 1e6:.1f} MB"
    runs, objects = counted(garbage.num_runs, "run"), counted(garbage.num_objects, "stored object")
    click.echo(f"{deleted} {runs} and {objects}, {size} in all")
    quarantined = [f"  {path}  {size_bytes / 1e6:.1f} MB" for path, size_bytes in garbage.quarantine.items()]
    if quarantined:
        click.echo("kept what failed verification (--empty-quarantine deletes it):")
    _print_lines(quarantined)
    _print_lines([f"ptpipe: {problem}" for problem in garbage.problems], err=True)
    return exit_code


def _print_lines(lines: Sequence[str], err: bool = False) -> None:
    for line in lines[:_MAX_LINES]:
        click.echo(line if line.isprintable() else ascii(line), err=err)
    if len(lines) > _MAX_LINES:
        click.echo(f"and {len(lines) - _MAX_LINES} more: --json lists all", err=err)
