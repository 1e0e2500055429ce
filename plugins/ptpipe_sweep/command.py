"""The command `ptpipe sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe import UsageError
from ptpipe.commands import (
    artifacts_option,
    echo,
    json_option,
    manifest_argument,
    open_store,
    print_json,
    print_table,
    read_plan,
    set_option,
    stdout_for_results,
)

if TYPE_CHECKING:
    from ptpipe import Plan
    from ptpipe_sweep.outcome import Objective
    from ptpipe_sweep.sweep import Method, Sweep

_MAX_NAMED = 3


@click.command()
@manifest_argument
@set_option
@click.option(
    "--over",
    "axes",
    multiple=True,
    required=True,
    metavar="[STAGE.]OPTION=VALUE,VALUE",
    help="Vary this option, or all options of that name where no stage is named; may be repeated. With --random and "
    "--optuna also a range: 1e-4..1e-2:log.",
)
@click.option(
    "--random", "num_random", type=click.IntRange(1, 1000), metavar="N", help="Try N combinations drawn at random."
)
@click.option(
    "--optuna", "num_optuna", type=click.IntRange(1, 1000), metavar="N", help="Let Optuna choose N combinations."
)
@click.option("--sweep-seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of --random and --optuna.")
@click.option("--maximize", metavar="STAGE.METRIC", help="Compare trials by this metric (finetune.val_accuracy).")
@click.option("--minimize", metavar="STAGE.METRIC", help="The same, where lower is better.")
@click.option("--model", metavar="MODEL", help="The row of the comparison to compare trials by.")
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Trials at a time; the machine's threads are divided among them.",
)
@click.option("--ray", "ray_address", metavar="ADDRESS", help="Run trials on this Ray cluster; `local` starts one.")
@artifacts_option
@click.option("--dry-run", is_flag=True, help="Print the trials, and how much of each is cached.")
@json_option
@click.option("--md", "as_markdown", is_flag=True, help="Print the table as Markdown.")
@stdout_for_results()
def sweep(  # noqa: PLR0913  # one parameter an option
    manifest: Path,
    settings: tuple[str, ...],
    axes: tuple[str, ...],
    num_random: int | None,
    num_optuna: int | None,
    sweep_seed: int,
    maximize: str | None,
    minimize: str | None,
    model: str | None,
    workers: int,
    ray_address: str | None,
    artifacts: Path,
    dry_run: bool,
    as_json: bool,
    as_markdown: bool,
) -> int:
    """Run a manifest with many values of its options, and compare.

    Each combination is a trial: a run of its own, over one artifacts folder, where stages that trials share run once.
    All are checked before the first one runs. Running again is resuming: what is done is cached.

    The exit code is 1 if a trial failed; the others run all the same. Refusals of gates are in the table: the exit code
    is 3 only if no trial passed.
    """
    from ptpipe_sweep.outcome import check_model, judged_model
    from ptpipe_sweep.space import parse_axes
    from ptpipe_sweep.sweep import Search, Sweep, Workers

    if as_json and as_markdown:
        raise UsageError("--json and --md are two forms of one table: give one")
    plan = read_plan(manifest, settings) if dry_run else _plan_to_read_again(manifest, settings)
    objective = _objective(maximize, minimize, plan)
    if model:
        check_model(model, plan)
    method = _method(num_random, num_optuna, objective)
    search = Search(method, num_random or num_optuna or 0, sweep_seed, objective, model or judged_model(plan))
    planned = Sweep(plan, parse_axes(axes, plan), search, artifacts, Workers(workers, ray_address))
    if dry_run:
        _print_dry_run(planned, as_json)
        return 0
    store = open_store(artifacts)
    if notice := store.open_for_writing():
        echo(notice, err=True)
    with store.in_use():  # between two trials too, `ptpipe gc` must not delete what is shared
        planned.run(store, _tell)
    _print(planned, as_json, as_markdown)
    return int(planned.exit_code)


def _plan_to_read_again(manifest: Path, settings: Sequence[str]) -> Plan:
    """Return the plan of a manifest. Raises UsageError where it is a pipe: the shell's `<(...)`."""
    plan = read_plan(manifest, settings)
    if not manifest.is_file():
        raise UsageError(f"{manifest} can be read only once, and every trial reads it: write it to a file")
    return plan


def _method(num_random: int | None, num_optuna: int | None, objective: Objective | None) -> Method:
    if num_random and num_optuna:
        raise UsageError("--random and --optuna are two ways to choose the trials: give one")
    if num_optuna and not objective:
        raise UsageError("--optuna needs --maximize STAGE.METRIC (or --minimize)")
    return "random" if num_random else "optuna" if num_optuna else "grid"


def _tell(line: str) -> None:
    echo(line, err=True)


def _objective(maximize: str | None, minimize: str | None, plan: Plan) -> Objective | None:
    from ptpipe_sweep.outcome import parse_objective

    if maximize and minimize:
        raise UsageError("give --maximize or --minimize, not both")
    text = maximize or minimize
    return parse_objective(text, bool(maximize), plan) if text else None


def _print(planned: Sweep, as_json: bool, as_markdown: bool) -> None:
    from ptpipe_sweep.table import ending_lines, explanation, markdown, table

    assert planned.record is not None
    endings = planned.record.ordered
    if as_json:
        print_json(planned.record.to_json())
        return
    headings, rows = table(endings)
    missing = planned.missing_objective()
    manifest = str(planned.plan.manifest.path)
    lines = [missing] if missing else ending_lines(endings, manifest, planned.artifacts, planned.threads)
    if as_markdown:
        echo("\n".join((markdown(headings, rows), "", *(f"    {line}" for line in lines))))
        return
    print_table(headings, rows)
    echo("\n".join((explanation(endings), *lines, f"record: {planned.record.folder / 'sweep.json'}")).strip())


def _print_dry_run(planned: Sweep, as_json: bool) -> None:
    from ptpipe_sweep.trials import shown

    trials = planned.first_trials
    statuses = [planned.cache_status(trial) for trial in trials]
    to_run = [[status.stage_id for status in found if not status.is_cached] for found in statuses]
    if as_json:
        print_json(
            [
                {"number": trial.number, "settings": trial.settings, "overrides": trial.overrides, "stages_to_run": ids}
                for trial, ids in zip(trials, to_run, strict=True)
            ]
        )
        return
    names = [axis.name for axis in planned.axes]
    rows = [
        (
            str(trial.number),
            *(shown(trial.settings[name]) for name in names),
            f"{len(found) - len(ids)} of {len(found)} stages",
            _shortened(ids),
        )
        for trial, found, ids in zip(trials, statuses, to_run, strict=True)
    ]
    print_table(("trial", *names, "cached", "to run"), rows)
    keys = {status.key.digest: status.is_cached for found in statuses for status in found}
    num_cached = sum(keys.values())
    echo(planned.describe())
    echo(f"{len(keys)} different stages: {num_cached} cached, {len(keys) - num_cached} to run")


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_MAX_NAMED])} and {more} more"
