"""The command `ptpipe seeds`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptpipe import Outcome, StageError, UsageError, nearest
from ptpipe.commands import (
    artifacts_option,
    echo,
    json_option,
    manifest_argument,
    print_json,
    print_table,
    read_plan,
    set_option,
    stdout_for_results,
)
from ptpipe_eval.verdicts import exit_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ptpipe import Plan, RunResult
    from ptpipe_eval.comparison import Comparison
    from ptpipe_eval.config import AccuracyConfig, QualityConfig

_QUIET = -1


@click.command()
@manifest_argument
@click.argument("gate")
@click.option(
    "--num-seeds",
    type=click.IntRange(2, 1000),
    default=5,
    show_default=True,
    help="How many seeds: the manifest's, and those that follow.",
)
@set_option
@artifacts_option
@json_option
@stdout_for_results()
def seeds(manifest: Path, gate: str, num_seeds: int, settings: tuple[str, ...], artifacts: Path, as_json: bool) -> int:
    """Run a manifest with several seeds; judge the mean.

    GATE is a gate.accuracy or gate.quality of the manifest: its candidate, max_drop, confidence and on_inconclusive
    are used. A gate of a run judges the files that the run made, which are one sample of what the manifest gives; this
    judges the mean drop over all seeds. Each seed is an ordinary run, up to the comparison, and its results are
    stored. The exit code is that of a gate: 0, 3 or 4.
    """
    plan = read_plan(manifest, settings)
    config, compare = _checked(plan, gate)
    results: dict[int, RunResult] = {}
    for seed in range(plan.manifest.seed, plan.manifest.seed + num_seeds):
        results[seed] = _ran(plan, seed, compare, artifacts)
        if results[seed].stages[compare].outcome not in (Outcome.DONE, Outcome.CACHED):
            return int(results[seed].exit_code)  # the run has reported why
    comparisons: dict[int, Any] = {seed: result.artifact(compare) for seed, result in results.items()}
    from ptpipe_eval.seeds.judge import judge_seeds

    try:
        verdict = judge_seeds(config, comparisons)
    except StageError as error:
        raise UsageError(f"{gate}: {error}") from error
    rows = _rows(config, comparisons, results)
    if as_json:
        print_json({"runs": rows, **verdict.summary()})
    else:
        _print(rows)
        echo(f"{verdict.decision}: {verdict.reason}")
    return int(exit_code(verdict))


def _checked(plan: Plan, gate: str) -> tuple[AccuracyConfig | QualityConfig, str]:
    """Return the gate's options and its comparison's stage. Raises UsageError for a stage that is no such gate."""
    from ptpipe_eval.config import AccuracyConfig, QualityConfig

    gates = [stage.id for stage in plan.stages if isinstance(stage.config, AccuracyConfig | QualityConfig)]
    if gate not in gates:
        guess = nearest(gate, gates)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise UsageError(f"{gate!r} is no gate.accuracy or gate.quality; there is {', '.join(gates) or 'none'}{hint}")
    config = plan[gate].config
    assert isinstance(config, AccuracyConfig | QualityConfig)
    if config.max_drop is None:
        raise UsageError(f"{gate} has no max_drop to judge by")
    if config.baseline_file is not None:
        raise UsageError(f"{gate} compares with one accepted file, of which there are no other seeds")
    return config, plan[gate].wiring["comparison"][0].stage


def _ran(plan: Plan, seed: int, compare: str, artifacts: Path) -> RunResult:
    from ptpipe import RunOptions, load_plan, run

    echo(f"seed {seed}", err=True)
    options = RunOptions(verbosity=_QUIET)
    return run(load_plan(plan, {"seed": seed}).subplan(compare), artifacts=artifacts, options=options)


def _rows(
    config: AccuracyConfig | QualityConfig, comparisons: Mapping[int, Comparison], results: Mapping[int, RunResult]
) -> list[dict[str, Any]]:
    """Return a row for each seed and candidate."""
    rows = []
    for seed, table in comparisons.items():
        metric = table.metric(getattr(config, "metric", "accuracy"))
        for name in config.names:
            drop = table.drop(name, metric)
            low, high = (None, None) if drop is None else drop.limits(config.confidence)
            values = {row.name: row.metrics[metric.name] for row in table.rows}
            rows.append(
                {
                    "seed": seed,
                    "run": results[seed].run_id,
                    "candidate": name,
                    "baseline_value": values[table.baseline],
                    "value": values[name],
                    metric.drop_name: metric.drop(values[name], values[table.baseline]),
                    "drop_low": low,
                    "drop_high": high,
                }
            )
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    headings = [name.replace("_", " ") for name in rows[0]]
    print_table(headings, [[_shown(value) for value in row.values()] for row in rows])


def _shown(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
