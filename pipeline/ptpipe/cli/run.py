"""`ptpipe run`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from ptpipe.cli.options import artifacts_option, json_option, manifest_argument, print_json, read_settings, set_option


@click.command()
@manifest_argument
@set_option
@artifacts_option
@click.option("--fresh", multiple=True, metavar="STAGE", help="Do this stage again though its result is stored.")
@click.option("--keep-going", is_flag=True, help="After a failure, still do the stages that don't depend on it.")
@click.option("-v", "--verbose", is_flag=True, help="Show the stages' log lines.")
@click.option("-q", "--quiet", is_flag=True, help="Show problems and the end only.")
@json_option
def run(  # noqa: PLR0913  # one parameter an option
    manifest: Path,
    settings: tuple[str, ...],
    artifacts: Path,
    fresh: tuple[str, ...],
    keep_going: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run a manifest: do what is new, take the rest from the store.

    Running again is resuming: what is finished is cached, and a training that was interrupted goes on from its last
    checkpoint. The exit code is 3 when a gate refused.
    """
    from ptpipe import api
    from ptpipe.engine import RunOptions
    from ptpipe.history import find_run

    options = RunOptions(fresh, keep_going, verbosity=int(verbose) - int(quiet))
    result = api.run(manifest, read_settings(settings), artifacts=artifacts, options=options)
    if as_json:
        with contextlib.suppress(BrokenPipeError):  # the run's end counts, whether or not somebody reads of it
            print_json(find_run(result.store, result.run_id)[0])
    return int(result.exit_code)
