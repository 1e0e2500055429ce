"""`ptpipe show`: one run in detail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ptpipe.cli.common import artifacts_option, describe_end, json_option, open_store, print_json, print_table


@click.command()
@click.argument("run")
@artifacts_option
@json_option
def show(run: str, artifacts: Path, as_json: bool) -> None:
    """Show one run: its stages' outcomes, metrics, notices and deliverables.

    RUN is a run's id, the unambiguous start or end of one, or `last`.
    """
    from ptpipe.store.runs import find_run

    record, folder = find_run(open_store(artifacts), run)
    if as_json:
        print_json(record)
        return
    click.echo(f"{record['run_id']}  {describe_end(record)} after {record['seconds']:.1f} s")
    click.echo(f"manifest {record['manifest']}, seed {record['seed']}")
    for setting, value in record["overrides"].items():
        click.echo(f"-s {setting}={json.dumps(value)}")
    machine = record["machine"]
    click.echo(f"on {machine['processor']}, {machine['num_cpus']} CPUs ({machine['fingerprint']})\n")
    print_table(("stage", "kind", "outcome", "took", "key", "metrics"), [_stage_row(s) for s in record["stages"]])
    for stage in record["stages"]:
        for notice in stage["notices"]:
            click.echo(f"! {stage['stage_id']}: {notice}")
        if stage["message"]:
            click.echo(f"{stage['outcome']} {stage['stage_id']}: {stage['message']}")
    click.echo(f"\n{folder}")
    for stage in record["stages"]:
        for name in stage["deliverables"]:
            click.echo(f"  {name}")


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    metrics = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in stage["metrics"].items()
        if isinstance(value, int | float | str)
    )
    took = f"{stage['seconds']:.2f} s"
    return (stage["stage_id"], stage["kind"], stage["outcome"], took, stage["key"][:12], metrics)
