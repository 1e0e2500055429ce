"""`ptpipe validate`: check a manifest without running it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import (
    counted,
    echo,
    echo_warnings,
    json_option,
    manifest_argument,
    print_json,
    read_plan,
    read_settings,
    set_option,
)
from ptpipe.errors import ManifestError, first_problems

if TYPE_CHECKING:
    from ptpipe.plan.bind import Plan


@click.command()
@manifest_argument
@set_option
@click.option(
    "--no-plugins",
    is_flag=True,
    help="Load no plugin that the manifest names: none of its code runs. What only they know is noted, not refused.",
)
@json_option
def validate(manifest: Path, settings: tuple[str, ...], no_plugins: bool, as_json: bool) -> int:
    """Check a manifest: kinds, options, wiring, and the plugins' own rules. Runs no stage, writes nothing.

    Loading a plugin executes it: check a manifest that you do not trust with --no-plugins. It judges everything except
    the stages of kinds that are neither built in nor installed, and the plugins' rules across stages beside them.
    """
    try:
        plan = _without_named_plugins(manifest, settings) if no_plugins else read_plan(manifest, settings)
    except ManifestError as error:
        if not as_json:
            raise
        print_json({"problems": [asdict(problem) for problem in error.problems], "warnings": [], "notes": []})
        return int(error.exit_code)
    notes = first_problems(plan.notes)
    if as_json:
        found = {"warnings": first_problems(plan.warnings), "notes": notes}
        print_json({"problems": [], **{name: [asdict(each) for each in group] for name, group in found.items()}})
        return 0
    echo_warnings(plan.warnings)
    for note in notes:
        echo(str(note))
    groups = {"warning": plan.warnings, "note": plan.notes}
    numbers = "".join(f", {counted(len(group), noun)}" for noun, group in groups.items() if group)
    echo(f"{manifest}: {counted(len(plan.manifest.stages), 'stage')}, no problems{numbers}")
    return 0


def _without_named_plugins(manifest: Path, settings: tuple[str, ...]) -> Plan:
    """Return the manifest bound to the built-in and installed plugins; raise ManifestError as `load_plan` does."""
    from ptpipe.manifest.manifest import load
    from ptpipe.plan.bind import bind
    from ptpipe.plan.vocabulary import load_vocabulary

    loaded = load(manifest).overridden_by(read_settings(settings))
    return bind(loaded, replace(load_vocabulary(), without_named=bool(loaded.plugins)))
