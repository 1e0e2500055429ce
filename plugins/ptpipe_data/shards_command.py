"""The command `ptpipe shards`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe import UsageError, nearest
from ptpipe.commands import (
    FiniteFloatRange,
    artifacts_option,
    json_option,
    manifest_argument,
    print_json,
    print_table,
    read_plan,
    set_option,
    stdout_for_results,
)

if TYPE_CHECKING:
    from ptpipe import Plan

_DEFAULT_MB = 256.0


@click.command()
@manifest_argument
@click.argument("stage")
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The folder to write; must not exist.",
)
@click.option("--samples-per-shard", type=click.IntRange(1), metavar="N", help="Samples in a shard.")
@click.option(
    "--shard-size-mb",
    type=FiniteFloatRange(0, min_open=True),
    metavar="MB",
    help=f"Size of a shard, at most (default: {_DEFAULT_MB:g}, without --samples-per-shard).",
)
@set_option
@artifacts_option
@json_option
@stdout_for_results()
def shards(  # noqa: PLR0913  # one parameter an option
    manifest: Path,
    stage: str,
    output: Path,
    samples_per_shard: int | None,
    shard_size_mb: float | None,
    settings: tuple[str, ...],
    artifacts: Path,
    as_json: bool,
) -> int:
    """Write the data set of a stage as tar shards, which data.shards reads.

    STAGE is a data stage of the manifest: it is run, or its result taken from the store. FOLDER gets the splits train,
    val and test as train-000000.tar and so on, in WebDataset's convention, and data.json with the facts of the data
    set. The samples of train are shuffled once. Image files are copied as they are, all else becomes .npy files.
    """
    from ptpipe import RunOptions, run
    from ptpipe_torch import Data

    plan = read_plan(manifest, settings)
    output_name = _data_output(plan, stage)
    if output.exists():
        raise UsageError(f"--output {output}: it exists already; remove it, or choose another folder")
    result = run(plan.subplan(stage), artifacts=artifacts, options=RunOptions(verbosity=-1))
    if result.exit_code:
        return int(result.exit_code)  # the run has reported why
    from ptpipe_data.shard_writer import ShardSize, write_shards

    data = result.artifact(stage, output_name)
    assert isinstance(data, Data)
    if shard_size_mb is None and samples_per_shard is None:
        shard_size_mb = _DEFAULT_MB
    size = ShardSize(samples_per_shard, None if shard_size_mb is None else int(shard_size_mb * 1e6))
    written = write_shards(data, output, size, plan.manifest.seed)
    if as_json:
        print_json([asdict(of) for of in written])
        return 0
    rows = [(of.split, f"{of.num_samples:,}", f"{of.num_shards:,}", f"{of.num_bytes / 1e6:,.1f}") for of in written]
    print_table(("split", "samples", "shards", "MB"), rows)
    return 0


def _data_output(plan: Plan, stage_id: str) -> str:
    """Return the name of a stage's data set among its outputs. Raises UsageError where there is none."""
    from ptpipe_torch import Data

    ids = [stage.id for stage in plan.stages]
    if stage_id not in ids:
        close = nearest(stage_id, ids)
        hint = f"did you mean {close!r}?" if close else f"it has {', '.join(ids)}"
        raise UsageError(f"{plan.manifest.path} has no stage {stage_id!r} ({hint})")
    names = [port.name for port in plan[stage_id].stage.outputs if issubclass(port.type, Data)]
    if not names:
        raise UsageError(f"{stage_id} ({plan[stage_id].kind}) makes no data set")
    return names[0]
