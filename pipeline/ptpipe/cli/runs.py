"""`ptpipe runs`, `ptpipe show` and `ptpipe gc`: what was, and getting rid of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ptpipe.cli.common import artifacts_option, json_option, open_store, print_json, print_table


@click.command()
@artifacts_option
@click.option("--name", help="Only runs of this manifest name.")
@json_option
def runs(artifacts: Path, name: str | None, as_json: bool) -> None:
    """List the runs in the artifacts folder, newest first."""
    from ptpipe.store.runs import run_records

    records = [r for r in run_records(open_store(artifacts)) if name in (None, r["name"])]
    if as_json:
        print_json([{key: value for key, value in record.items() if key != "stages"} for record in records])
        return
    if not records:
        click.echo(f"no runs under {artifacts}")
        return
    rows = [
        (
            r["run_id"],
            r["started_at"][:19].replace("T", " "),
            f"{r['seconds']:.1f} s",
            _ending(r),
            _outcomes(r["stages"]),
        )
        for r in records
    ]
    print_table(("run", "started (UTC)", "took", "ended", "stages"), rows)


@click.command()
@click.argument("run")
@artifacts_option
@json_option
def show(run: str, artifacts: Path, as_json: bool) -> None:
    """Show one run: its stages' outcomes, figures and notices. RUN is an id, the end of one, or `last`."""
    from ptpipe.store.runs import find_run

    record, folder = find_run(open_store(artifacts), run)
    if as_json:
        print_json(record)
        return
    click.echo(f"{record['run_id']}  {_ending(record)} after {record['seconds']:.1f} s")
    click.echo(f"manifest {record['manifest']}, seed {record['seed']}")
    for setting, value in record["overrides"].items():
        click.echo(f"-s {setting}={json.dumps(value)}")
    machine = record["machine"]
    click.echo(f"on {machine['processor']}, {machine['num_cpus']} CPUs ({machine['fingerprint']})\n")
    print_table(("stage", "kind", "outcome", "took", "key", "figures"), [_stage_row(s) for s in record["stages"]])
    for stage in record["stages"]:
        for notice in stage["notices"]:
            click.echo(f"! {stage['stage_id']}: {notice}")
        if stage["message"]:
            click.echo(f"{stage['outcome']} {stage['stage_id']}: {stage['message']}")
    click.echo(f"\n{folder}")


@click.command()
@artifacts_option
@click.option(
    "--keep-runs",
    default=10,
    show_default=True,
    type=click.IntRange(min=0),
    help="Newest runs to keep, per manifest name.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc(artifacts: Path, keep_runs: int, dry_run: bool, as_json: bool) -> None:
    """Delete old runs and every stored result that only they used."""
    from ptpipe.execution.gc import collect_garbage

    garbage = collect_garbage(open_store(artifacts), keep_runs, dry_run)
    if as_json:
        print_json({**vars(garbage), "dry_run": dry_run})
        return
    would = "would delete" if dry_run else "deleted"
    size = f"{garbage.size_bytes / 1e6:.1f} MB"
    click.echo(f"{would} {garbage.num_runs} runs and {garbage.num_objects} stored objects, {size} in all")


def _ending(record: dict[str, Any]) -> str:
    if not record["finished"]:
        return "unfinished"
    words = {0: "done", 1: "failed", 3: "refused", 4: "undecided", 5: "corrupt", 130: "interrupted", 143: "terminated"}
    return words.get(record["exit_code"], f"exit {record['exit_code']}")


def _outcomes(stages: list[dict[str, Any]]) -> str:
    counts = Counter(stage["outcome"] for stage in stages)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    figures = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in stage["metrics"].items()
        if isinstance(value, int | float | str)
    )
    took = f"{stage['seconds']:.2f} s"
    return (stage["stage_id"], stage["kind"], stage["outcome"], took, stage["key"][:12], figures)
