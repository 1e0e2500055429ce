"""The commands `ptpipe baseline` and `ptpipe gate`. They import no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptpipe import StageError, UsageError, Verdict
from ptpipe.commands import (
    FiniteFloatRange,
    artifacts_option,
    echo,
    json_option,
    open_store,
    print_json,
    stdout_for_results,
)
from ptpipe_eval.verdicts import exit_code

if TYPE_CHECKING:
    from ptpipe_eval.baseline.file import Baseline
    from ptpipe_eval.baseline.past_run import PastComparison


@click.group()
def baseline() -> None:
    """Accept a run's model as the baseline of later ones."""


@baseline.command()
@click.argument("run")
@click.option("--model", metavar="NAME", help="The model, as in the comparison; may be left out if there is only one.")
@click.option("--stage", metavar="STAGE", help="The comparison's stage; may be left out if there is only one.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file to write (default: baselines/NAME.json).",
)
@click.option("--force", is_flag=True, help="Replace a baseline that differs.")
@artifacts_option
@json_option
def accept(  # noqa: PLR0913  # one parameter an option
    run: str, model: str | None, stage: str | None, output: Path | None, force: bool, artifacts: Path, as_json: bool
) -> int:
    """Write what a model of a run made of every sample, and its metrics, to a file.

    RUN is a run's id, the unambiguous start or end of one, or `last`; it has an eval.compare. The file has digests of
    model and data, the versions and the machine, and a bit for each sample. A file that is there is replaced with
    --force alone: without it, what would change is shown, and the exit code is 2.
    """
    from ptpipe_eval.baseline.accept import accepted, describe
    from ptpipe_eval.baseline.past_run import read_comparison

    new = accepted(read_comparison(open_store(artifacts), run, stage), model)
    path = output or Path("baselines") / f"{new.model.name}.json"
    is_new = _differs(path, new, force)
    if is_new:
        try:
            new.write(path)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    if as_json:
        print_json({"file": str(path), "written": is_new, **new.model_dump(mode="json", exclude=_BULK)})
    else:
        echo(f"{'wrote' if is_new else 'unchanged:'} {path}: {describe(new)}")
        if unpaired := [metric.name for metric in new.metrics if metric.name not in (*new.right, *new.scores)]:
            paired = " or ".join((*new.right, *new.scores))
            echo(
                f"note: no drop in {', '.join(unpaired)} can be judged against it; choose the metric {paired}", err=True
            )
    return 0


_BULK = {"metrics": {"__all__": {"right", "scores"}}}


def _differs(path: Path, new: Baseline, force: bool) -> bool:
    """Return whether the file is to be written. Raises UsageError where it has something else, unless forced."""
    from ptpipe_eval.baseline.accept import differences
    from ptpipe_eval.baseline.file import Baseline

    if not path.exists():
        return True
    if force:
        return True
    changes = list(differences(Baseline.read(path), new))
    if not changes:
        return False
    for line in changes:
        echo(line, err=True)
    raise UsageError(f"{path} has another baseline (--force replaces it)")


@click.command()
@click.argument("run")
@click.option(
    "--baseline", "file", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="What `ptpipe baseline accept` wrote.",
)  # fmt: skip
@click.option(
    "--max-drop", required=True, type=FiniteFloatRange(0), metavar="DROP",
    help="By how much a model may be worse, in units of the metric: 0.003 is 0.3 points of accuracy.",
)  # fmt: skip
@click.option(
    "--model", "models", multiple=True, metavar="NAME",
    help="The model to judge (default: the accepted one's name); may be repeated, then each must pass.",
)  # fmt: skip
@click.option("--stage", metavar="STAGE", help="The comparison's stage (default: that of the baseline's run).")
@click.option("--metric", metavar="NAME", help="The metric to judge (default: the baseline's first one).")
@click.option(
    "--confidence", type=click.FloatRange(0.5, 1, min_open=True, max_open=True), default=0.95, show_default=True,
    help="To decide with, one-sided.",
)  # fmt: skip
@click.option(
    "--on-inconclusive", type=click.Choice(["estimate", "warn", "fail"]), default="estimate", show_default=True,
    help="Exit code 4 where the samples are too few: if the drop is above --max-drop, never, or always.",
)  # fmt: skip
@artifacts_option
@json_option
@stdout_for_results()
def gate(  # noqa: PLR0913  # one parameter an option
    run: str,
    file: Path,
    max_drop: float,
    models: tuple[str, ...],
    stage: str | None,
    metric: str | None,
    confidence: float,
    on_inconclusive: str,
    artifacts: Path,
    as_json: bool,
) -> int:
    """Judge a past run's models against an accepted one.

    Nothing is run again. RUN is a run's id, the unambiguous start or end of one, or `last`. Its models are compared
    with the baseline sample by sample, by id, as gate.quality does. The exit code is 0, 3 if a model is refused, 4 if
    that can't be decided and --on-inconclusive says so; 2 where the samples are others.
    """
    from ptpipe_eval.baseline.file import Baseline
    from ptpipe_eval.baseline.past_run import read_comparison

    accepted = Baseline.read(file)
    past = read_comparison(open_store(artifacts), run, stage, accepted.run.stage)
    names = tuple(dict.fromkeys(models)) or (accepted.model.name,)
    options = {
        **({"candidates": names} if len(names) > 1 else {"candidate": names[0]}),
        "metric": metric,
        "max_drop": max_drop,
        "confidence": confidence,
        "on_inconclusive": on_inconclusive,
    }
    verdict = _judged(accepted, past, options)
    notes = list(_notes(accepted, past))
    if as_json:
        print_json({"run": past.record["run_id"], "baseline_file": str(file), "notes": notes, **verdict.summary()})
    else:
        for note in notes:
            echo(f"note: {note}", err=True)
        echo(f"{verdict.decision}: {verdict.reason}")
    return int(exit_code(verdict))


def _judged(accepted: Baseline, past: PastComparison, options: Mapping[str, object]) -> Verdict:
    from ptpipe_eval.baseline.judge import against, check_metric
    from ptpipe_eval.config import QualityConfig
    from ptpipe_eval.quality.gates import judge_quality

    config = QualityConfig.model_validate(options)
    for name in config.names:
        past.row(name)
    try:
        compared = against(accepted, past.table, config.names)
        check_metric(accepted, compared.metric(config.metric))
        return judge_quality(config, compared)
    except StageError as error:
        raise UsageError(f"run {past.record['run_id']}: {error}") from error


def _notes(accepted: Baseline, past: PastComparison) -> list[str]:
    notes = []
    if past.inputs and past.inputs["data"] != (accepted.data.digest,):
        what = "inputs" if accepted.data.targets_sha256 and past.samples.targets_sha256 else "inputs or targets"
        notes.append(f"the data set differs from the baseline's, with the same ids: {what} may have changed")
    now, then = (_processor(facts) for facts in (past.stage.get("environment", {}), accepted.environment))
    if now != then:
        notes.append(f"the baseline was evaluated on another processor, {then}: int8 results may differ by that")
    return notes


def _processor(environment: Mapping[str, Any]) -> str:
    return str((environment.get("machine") or {}).get("processor"))
