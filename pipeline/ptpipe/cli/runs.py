"""`ptpipe runs`: list past runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from ptpipe.cli.common import artifacts_option, describe_end, echo, json_option, open_store, print_json, print_table


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
    elif records:
        print_table(("run", "started (UTC)", "took", "ended", "stages"), map(_row, records))
    else:
        echo(f"no runs under {artifacts}")


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    started = record["started_at"][:19].replace("T", " ")
    counts = Counter(stage["outcome"] for stage in record["stages"])
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    return (record["run_id"], started, f"{record['seconds']:.1f} s", describe_end(record), outcomes)
