"""`ptpipe plan`: what a run would do, stage by stage."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import (
    artifacts_option,
    counted,
    echo,
    echo_warnings,
    json_option,
    manifest_argument,
    print_json,
    print_table,
    read_plan,
    set_option,
)

if TYPE_CHECKING:
    from ptpipe.plan.bind import Plan, PlannedStage
    from ptpipe.plan.cache_status import CacheStatus


@click.command()
@manifest_argument
@set_option
@artifacts_option
@click.option("--why", is_flag=True, help="Print everything that differs from the last run, not only the first thing.")
@click.option("--fresh", multiple=True, metavar="STAGE", help="As in `ptpipe run`.")
@json_option
def plan(
    manifest: Path,
    settings: tuple[str, ...],
    artifacts: Path,
    why: bool,
    fresh: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print the wiring, and for each stage whether a run would run it or find it cached, and why.

    Loads the plugins that the manifest names, which executes their code: see `ptpipe validate --no-plugins`.
    """
    from ptpipe.api import cache_status
    from ptpipe.plan.cache_status import check_results

    bound = read_plan(manifest, settings)
    statuses = cache_status(bound, artifacts=artifacts, fresh=fresh)
    warnings = check_results(bound, statuses)
    if as_json:
        stages = [_facts(bound[item.stage_id], item) for item in statuses]
        print_json({"stages": stages, "warnings": [asdict(warning) for warning in warnings]})
        return
    print_table(("stage", "kind", "inputs", "key", "action"), [_row(bound, item, why) for item in statuses])
    num_cached = sum(item.is_cached for item in statuses)
    echo(f"{num_cached} of {counted(len(statuses), 'stage')} {'is' if len(statuses) == 1 else 'are'} cached")
    echo_warnings(warnings)


def _row(bound: Plan, item: CacheStatus, why: bool) -> tuple[str, ...]:
    stage = bound[item.stage_id]
    if item.is_cached:
        action = "cached"
    elif why or len(item.reasons) <= 1:
        action = f"run: {'; '.join(item.reasons)}"
    else:
        action = f"run: {item.reasons[0]} (and {len(item.reasons) - 1} more: --why)"
    return (stage.id, stage.kind, _inputs(stage), item.key.short, action)


def _inputs(stage: PlannedStage) -> str:
    parts = []
    for port, references in stage.wiring.items():
        names = ", ".join(map(str, references))
        parts.append(f"{port}: [{names}]" if len(references) > 1 else f"{port}: {names}")
    return ", ".join(parts)


def _facts(stage: PlannedStage, item: CacheStatus) -> dict[str, object]:
    return {
        "id": stage.id,
        "kind": stage.kind,
        "options": stage.options,
        "inputs": {port: [str(reference) for reference in references] for port, references in stage.wiring.items()},
        "key": item.key.digest,
        "cached": item.is_cached,
        "reasons": list(item.reasons),
    }
