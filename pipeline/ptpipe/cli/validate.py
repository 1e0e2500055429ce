"""`ptpipe validate`: check a manifest without running it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ptpipe.cli.common import json_option, manifest_argument, print_json, read_plan, set_option
from ptpipe.errors import ManifestError


@click.command()
@manifest_argument
@set_option
@json_option
def validate(manifest: Path, settings: tuple[str, ...], as_json: bool) -> int:
    """Check a manifest: kinds, options, wiring, and the plugins' own rules. Runs nothing, writes nothing."""
    try:
        plan = read_plan(manifest, settings)
    except ManifestError as error:
        if not as_json:
            raise
        print_json({"problems": [asdict(problem) for problem in error.problems]})
        return int(error.exit_code)
    if as_json:
        print_json({"problems": []})
    else:
        click.echo(f"{manifest}: {len(plan.stages)} stages, no problems")
    return 0
