"""`ptpipe show`: one run in detail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ptpipe.cli.common import (
    artifacts_option,
    describe_end,
    echo,
    json_option,
    open_store,
    print_entries,
    print_json,
    print_table,
)


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
    echo(f"{record['run_id']}  {describe_end(record)} after {record['seconds']:.1f} s")
    echo(f"manifest {record['manifest']}, seed {record['seed']}")
    for setting, value in record["overrides"].items():
        echo(f"-s {setting}={json.dumps(value)}")
    machine = record["machine"]
    echo(f"on {machine['processor']}, {machine['num_cpus']} CPUs ({machine['fingerprint']})\n")
    print_table(("stage", "kind", "outcome", "took", "key"), [_stage_row(s) for s in record["stages"]])
    metrics = {stage["stage_id"]: _metrics(stage) for stage in record["stages"]}
    print_entries("metrics", {stage_id: text for stage_id, text in metrics.items() if text})
    for stage in record["stages"]:
        for notice in stage["notices"]:
            echo(f"! {stage['stage_id']}: {notice}")
        if stage["message"]:
            echo(f"{stage['outcome']} {stage['stage_id']}: {stage['message']}")
    echo(f"\n{folder}")
    for stage in record["stages"]:
        for name in stage["deliverables"]:
            echo(f"  {name}")


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    took = f"{stage['seconds']:.2f} s"
    return (stage["stage_id"], stage["kind"], stage["outcome"], took, stage["key"][:12])


def _metrics(stage: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in stage["metrics"].items()
        if isinstance(value, int | float | str)
    )
