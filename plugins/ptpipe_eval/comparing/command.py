"""The command `ptpipe compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptpipe import JSON, PtpipeError, RunOptions, UsageError, load_plan, run
from ptpipe.commands import (
    FiniteFloatRange,
    artifacts_option,
    find_run,
    open_store,
    print_json,
    print_rows,
    read_settings,
    result_stream,
    set_option,
    sorted_rows,
    stdout_for_results,
    table_options,
)

if TYPE_CHECKING:
    from ptpipe import RunResult, Store

_LIST = "N,N"
_MEASURING = (
    "settings",
    "baseline",
    "batch_sizes",
    "lengths",
    "threads",
    "budget",
    "latency_only",
    "no_latency",
    "fresh",
)


@click.command()
@click.argument("subjects", nargs=-1, required=True, metavar="A B...")
@click.option("--data", metavar="MANIFEST[:STAGE]", help="Measure on the data of this manifest's stage.")
@click.option("--baseline", metavar="A", help="What the others are compared with (default: the first).")
@click.option("--batch-sizes", metavar=_LIST, help="Batch sizes to measure latency at (default: 1,32).")
@click.option("--lengths", metavar=_LIST, help="Lengths of sequences to measure latency at (default: the data's own).")
@click.option("--threads", metavar="one,all", help="One thread, all processors, or both (default: both).")
@click.option("--budget", type=FiniteFloatRange(0, min_open=True), metavar="S", help="Seconds to measure latency in.")
@click.option("--latency-only", is_flag=True, help="Do not measure quality.")
@click.option("--no-latency", is_flag=True, help="Measure quality and size alone.")
@click.option("--fresh", is_flag=True, help="Measure again although the result is stored.")
@click.option("-q", "--quiet", is_flag=True, help="Show only problems and the end.")
@set_option
@artifacts_option
@table_options
@stdout_for_results()
def compare(
    subjects: tuple[str, ...],
    artifacts: Path,
    data: str | None,
    sort_by: str | None,
    table_format: str | None,
    **measuring: Any,
) -> int:
    """Compare models of runs, ONNX files and model folders: quality, size and latency.

    A, B and so on are each a run (the models that it compared, or else all that it delivered), RUN:STAGE, the first
    digits of a stage's key or an artifact's digest, an .onnx file, or a folder that `ptpipe get` wrote. The first one
    is the baseline. All are measured together on the data of a stage of MANIFEST, in a run like any other: its results
    are stored, and it has a record and a report. -s sets options of that manifest's stages, and of the models and
    `compare` by name.

    Without --data, runs only: what they recorded is listed side by side, with the options, metrics, sizes and verdicts
    that differ. Nothing is measured again.
    """
    store = open_store(artifacts)
    if data is not None:
        if sort_by is not None:
            raise UsageError("--sort is for recorded results: leave out --data")
        return _measure(store, subjects, data, table_format, measuring)
    if given := [name for name in _MEASURING if measuring[name]]:
        option = "-s" if given[0] == "settings" else f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{option} is for measuring: name the data to measure on, --data MANIFEST")
    _list_recorded(store, subjects, sort_by, table_format)
    return 0


def _list_recorded(store: Store, texts: Sequence[str], sort_by: str | None, table_format: str | None) -> None:
    from ptpipe_eval.comparing.recorded import ALWAYS, recorded_rows, session_note

    runs = {folder.name: (record, folder) for record, folder in (_past_run(store, text) for text in texts)}
    rows = sorted_rows(recorded_rows(list(runs.values())), sort_by)
    if table_format == "json":
        print_json([{name: cell.value for name, cell in row.items()} for row in rows])
    else:
        print_rows(rows, ALWAYS, table_format, "Comparison of runs", session_note(rows))


def _past_run(store: Store, text: str) -> tuple[Mapping[str, Any], Path]:
    """Return a run's record and folder. Raises UsageError where the text is none's."""
    if Path(text).exists() or Path(text).suffix == ".onnx" or ":" in text:
        raise UsageError(f"{text} is no run: to measure models, name the data, --data MANIFEST")
    return find_run(store, text)


def _measure(
    store: Store, texts: Sequence[str], data: str, table_format: str | None, measuring: Mapping[str, Any]
) -> int:
    from ptpipe_eval.comparing.manifest import COMPARE, compose, select_data, split_data_argument
    from ptpipe_eval.comparing.subjects import find_subjects

    settings = read_settings(measuring["settings"])
    kind, options = _comparison(measuring)
    subjects = [subject for text in texts for subject in find_subjects(store, text)]
    path, stage = split_data_argument(data)
    plan = load_plan(path)
    known = {own.id for own in plan.stages} | {"seed"}
    of_manifest = {name: value for name, value in settings.items() if name.partition(".")[0] in known}
    source = select_data(load_plan(plan, of_manifest), stage)
    content = compose(source, subjects, measuring["baseline"], kind, options)
    others = {name: value for name, value in settings.items() if name not in of_manifest}
    run_options = RunOptions((COMPARE,) if measuring["fresh"] else (), verbosity=-1 if measuring["quiet"] else 0)
    result = run(load_plan(content, others), artifacts=store.root, options=run_options)
    _print_result(result, COMPARE, table_format)
    return int(result.exit_code)


def _comparison(measuring: Mapping[str, Any]) -> tuple[str, dict[str, JSON]]:
    """Return kind and options of the comparison. Raises UsageError for options that contradict each other."""
    if measuring["latency_only"] and measuring["no_latency"]:
        raise UsageError("--latency-only and --no-latency leave nothing to measure")
    options: dict[str, JSON] = {}
    for name in ("batch_sizes", "lengths"):
        if measuring[name]:
            options[name] = [*_numbers(f"--{name.replace('_', '-')}", measuring[name])]
    if measuring["threads"]:
        options["threads"] = [word.strip() for word in measuring["threads"].split(",")]
    if measuring["budget"]:
        options["budget_s"] = measuring["budget"]
    if measuring["no_latency"]:
        if options:
            raise UsageError("--no-latency: leave out --batch-sizes, --lengths, --threads and --budget")
        options["batch_sizes"] = []
    return "eval.latency" if measuring["latency_only"] else "eval.compare", options


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{option} {text}: expected numbers separated by commas, such as 1,32")
    return [int(word) for word in words]


def _print_result(result: RunResult, stage_id: str, table_format: str | None) -> None:
    """Print what was asked for to stdout; the run's reporters have shown the rest."""
    if table_format == "json":
        outputs = result.stages[stage_id].outputs
        comparison = next((output["summary"] for output in outputs.values()), None)
        print_json({"run_id": result.run_id, "exit_code": int(result.exit_code), "comparison": comparison})
    elif table_format is not None:
        report = result.folder / f"report.{table_format}"
        if not report.is_file():
            raise PtpipeError(f"the run has written no {report.name}: {result.folder}")
        click.echo(report.read_text(encoding="utf-8"), result_stream(), nl=False)
