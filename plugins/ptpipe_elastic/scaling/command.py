"""The command `ptpipe scaling`: options and tables."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe import UsageError
from ptpipe.commands import (
    FiniteFloatRange,
    echo,
    json_option,
    manifest_argument,
    print_json,
    print_table,
    read_plan,
    set_option,
    stdout_for_results,
)

if TYPE_CHECKING:
    from ptpipe_elastic.scaling.fit import AllReduceTime
    from ptpipe_elastic.scaling.measure import Setting
    from ptpipe_elastic.scaling.report import Report

_MAX_WORKERS = 4096
_SIZES_BYTES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24))


@click.command()
@manifest_argument
@set_option
@click.option(
    "--workers", default="1,2", show_default=True, metavar="N,N", help="Numbers of workers, beginning with 1."
)
@click.option("--mode", "modes", default="ddp", show_default=True, metavar="MODE,MODE", help="Parallelism modes.")
@click.option("--stage", "named", metavar="STAGE", help="The training stage, if there are several.")
@click.option(
    "--latency-us",
    type=FiniteFloatRange(0),
    help="Predict for a network with this latency per message.",
)
@click.option(
    "--bandwidth-gbit-s",
    type=FiniteFloatRange(0, min_open=True),
    help="Predict for a network with this bandwidth.",
)
@click.option(
    "--artifacts",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep results here and reuse stored ones; without it, everything runs from scratch in a temporary folder.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    metavar="FOLDER",
    help="Folder for the plot, scaling.svg (default: the current one).",
)
@json_option
@stdout_for_results()
def scaling(  # noqa: PLR0913  # one parameter an option
    manifest: Path,
    settings: tuple[str, ...],
    workers: str,
    modes: str,
    named: str | None,
    latency_us: float | None,
    bandwidth_gbit_s: float | None,
    artifacts: Path | None,
    output: Path,
    as_json: bool,
) -> int:
    """Measure how a training scales with its workers; predict it to 256.

    Trains a stage for some seconds with each number of workers in each parallelism mode, on this machine: one batch
    and one thread per worker, three alternating rounds, medians. Fits the serial fraction of Amdahl's law, and latency
    and bandwidth of an all-reduce. The modes are those of the stage's option `parallel`.
    """
    from ptpipe import host
    from ptpipe_elastic.scaling.measure import Measurement, choose_stage
    from ptpipe_elastic.scaling.plot import draw, open_folder
    from ptpipe_elastic.scaling.report import Measurements, Network, Subject, make_report

    wanted = _settings(workers, modes)
    plan = read_plan(manifest, settings)
    stage = choose_stage(plan, named)
    open_folder(output)
    folder: AbstractContextManager[str | Path] = nullcontext(artifacts) if artifacts else _temporary()
    with folder as place:
        measurement = Measurement(plan, stage, Path(place), _tell)
        measurement.check(wanted)
        times = _time_all_reduce(sorted({setting.workers for setting in wanted} - {1}))
        measured = measurement.measure(wanted)
    num_cpus = int(host.describe()["num_cpus"])
    report = make_report(
        Subject(str(manifest), stage.id, stage.kind, measurement.samples_per_worker),
        Measurements(measured.throughputs, tuple(times), measured.gradient_bytes, num_cpus, measured.notices),
        Network(latency_us, bandwidth_gbit_s),
    )
    if as_json:
        print_json(report.facts())
    else:
        _print(report)
    plot = draw(report, output)
    _tell(f"plot: {plot}" if plot else "no plot: it needs `pip install 'ptpipe[plots]'`")
    return 0


def _tell(line: str) -> None:
    echo(line, err=True)


def _temporary() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="ptpipe-scaling-", ignore_cleanup_errors=True)


def _settings(workers: str, modes: str) -> list[Setting]:
    """A single worker, which has no mode, then each mode with each other number."""
    from ptpipe_elastic.scaling.measure import Setting

    words = [word.strip() for word in workers.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= _MAX_WORKERS for word in words):
        raise UsageError(f"--workers {workers}: expected numbers separated by commas, such as 1,2,4")
    numbers = sorted(set(map(int, words)))
    if numbers[0] != 1:
        raise UsageError(f"--workers {workers}: begin with 1: the other numbers are compared with a single worker")
    names = dict.fromkeys(word.strip() for word in modes.split(","))
    return [Setting("single", 1), *(Setting(name, number) for name in names for number in numbers if number > 1)]


def _time_all_reduce(numbers: Sequence[int]) -> list[AllReduceTime]:
    from ptpipe_elastic.collectives import time_all_reduce
    from ptpipe_elastic.scaling.fit import AllReduceTime

    times: list[AllReduceTime] = []
    for number in numbers:
        _tell(f"timing an all-reduce between {number} workers")
        seconds = time_all_reduce(number, _SIZES_BYTES)
        times += [AllReduceTime(number, size, found) for size, found in zip(_SIZES_BYTES, seconds, strict=True)]
    return times


def _print(report: Report) -> None:
    subject = report.subject
    echo(
        f"{subject.stage} ({subject.kind}) of {subject.manifest}: {subject.samples_per_worker} samples per worker "
        "and batch, one thread per worker\n"
    )
    _print_measured(report)
    _print_fits(report)
    for mode in report.modes:
        _print_predicted(report, mode)
    for title, lines in (("assumptions", report.assumptions), ("notices", report.notices)):
        if lines:
            echo("\n".join((f"\n{title}", *(f"- {line}" for line in lines))))


def _print_measured(report: Report) -> None:
    rows = []
    for item in report.throughputs:
        samples = (f"{item.samples_per_s:,.0f}", f"{min(item.rounds):,.0f} to {max(item.rounds):,.0f}")
        ratios = (f"{report.speedup(item):.2f}x", f"{report.efficiency(item):.1%}")
        rows.append((item.mode, str(item.workers), *samples, f"{1000 * item.step_s:.3g}", *ratios))
    print_table(("mode", "workers", "samples/s", "rounds", "step, ms", "speedup", "efficiency"), rows)


def _print_fits(report: Report) -> None:
    rows = []
    for mode, law in report.amdahl.items():
        limit = f"speedup limit {law.max_speedup:.3g}x" if math.isfinite(law.max_speedup) else "no speedup limit"
        rows.append((f"{mode}: Amdahl's serial fraction", f"{law.serial_fraction:.2%}", limit))
    if report.fit:
        link = report.fit.link
        rows.append(
            ("all-reduce: latency per message", f"{link.latency_us:.3g} us", f"RMS error {report.fit.error:.0%}")
        )
        rows.append(("all-reduce: bandwidth", f"{link.bandwidth_gbit_s:.3g} Gbit/s", ""))
    rows += [(f"{mode}: gradients", f"{size / 1e6:.3g} MB", "") for mode, size in report.gradient_bytes.items()]
    if rows:
        echo("")
        print_table(("fitted", "", ""), rows)


def _print_predicted(report: Report, mode: str) -> None:
    from ptpipe_elastic.scaling.fit import PREDICTED

    law = report.amdahl.get(mode)
    predictions = {row.workers: row for row in report.predictions.get(mode, ())}
    if not law and not predictions:
        return
    measured = {item.workers: f"{report.efficiency(item):.1%}" for item in report.throughputs if item.mode == mode}
    rows = []
    for workers in PREDICTED:
        cells = [str(workers), measured.get(workers, "")]
        if row := predictions.get(workers):
            cells += [f"{1000 * row.comm_s:.3g}", f"{row.efficiency_low:.1%} to {row.efficiency_high:.1%}"]
        rows.append([*cells, f"{law.efficiency(workers):.1%}"] if law else cells)
    headings = ["workers", "measured", *(("communication, ms", "predicted from it") if predictions else ())]
    echo(f"\n{mode}: efficiency" + ("" if predictions else "; this mode's communication is not modelled"))
    print_table([*headings, "by Amdahl's law"] if law else headings, rows)
