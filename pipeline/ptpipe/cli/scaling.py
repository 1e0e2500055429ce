"""`ptpipe scaling`: how much faster more workers are, measured, fitted and predicted."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import json_option, manifest_argument, print_json, print_table, read_plan, set_option
from ptpipe.errors import UsageError

if TYPE_CHECKING:
    from ptpipe.cli.scaling_report import Report
    from ptpipe.plan.bind import Plan
    from ptpipe.scaling import AllReduceTime
    from ptpipe.throughput import Setting

_MAX_WORKERS = 4096
_SIZES_BYTES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24))


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


@click.command()
@manifest_argument
@set_option
@click.option("--workers", default="1,2", show_default=True, metavar="N,N", help="Numbers of workers; 1 among them.")
@click.option("--mode", "modes", default="ddp", show_default=True, metavar="MODE,MODE", help="Ways to spread the work.")
@click.option("--stage", "named", metavar="STAGE", help="The training stage, where there are several.")
@click.option(
    "--latency-us",
    type=click.FloatRange(0),
    callback=_finite,
    help="Predict for a network with this latency a message.",
)
@click.option(
    "--bandwidth-gbit-s",
    type=click.FloatRange(0, min_open=True),
    callback=_finite,
    help="Predict for a network of this bandwidth.",
)
@click.option(
    "--artifacts",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep results here, and take from here what is stored. Otherwise all is made anew and thrown away.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    metavar="FOLDER",
    help="Where the plot, scaling.svg, goes; otherwise here.",
)
@json_option
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
    """Measure how a training stage scales with the number of workers, and predict it up to 256.

    Trains the stage some seconds with each number of workers in each mode, on this machine: a batch for each worker,
    one thread each, three rounds in turn, medians. Fits Amdahl's serial share, and latency and bandwidth of an
    all-reduce. The modes are those of the stage's option `parallel`.
    """
    from ptpipe import host
    from ptpipe.cli.scaling_plot import draw, open_folder
    from ptpipe.cli.scaling_report import Figures, Network, Subject, make_report
    from ptpipe.throughput import Measurement, choose_stage

    wanted = _settings(workers, modes)
    plan = read_plan(manifest, settings)
    stage = choose_stage(plan, named)
    open_folder(output)
    folder: AbstractContextManager[str | Path] = nullcontext(artifacts) if artifacts else _temporary()
    with folder as place:
        measurement = Measurement(plan, stage, Path(place), _tell)
        measurement.check(wanted)
        times = _time_all_reduce(plan, sorted({setting.workers for setting in wanted} - {1}))
        measured = measurement.measure(wanted)
    num_cpus = int(host.describe()["num_cpus"])
    report = make_report(
        Subject(str(manifest), stage.id, stage.kind, measurement.images_per_worker),
        Figures(measured.throughputs, tuple(times), measured.gradient_bytes, num_cpus, measured.notices),
        Network(latency_us, bandwidth_gbit_s),
    )
    if as_json:
        print_json(report.facts())
    else:
        _print(report)
    plot = draw(report, output)
    _tell(f"plot: {plot}" if plot else "no plot: `pip install 'ptpipe[plots]'` brings what draws it")
    return 0


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _temporary() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="ptpipe-scaling-", ignore_cleanup_errors=True)


def _settings(workers: str, modes: str) -> list[Setting]:
    """One worker, which is of no mode, then each mode with each other number."""
    from ptpipe.throughput import Setting

    words = [word.strip() for word in workers.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= _MAX_WORKERS for word in words):
        raise UsageError(f"--workers {workers}: numbers with commas between are needed, such as 1,2,4")
    numbers = sorted(set(map(int, words)))
    if numbers[0] != 1:
        raise UsageError(f"--workers {workers}: begin with 1: what one worker does is what others are measured by")
    names = dict.fromkeys(word.strip() for word in modes.split(","))
    return [Setting("single", 1), *(Setting(name, number) for name in names for number in numbers if number > 1)]


def _time_all_reduce(plan: Plan, numbers: Sequence[int]) -> list[AllReduceTime]:
    from ptpipe.scaling import AllReduceTime

    times: list[AllReduceTime] = []
    for number in numbers:
        _tell(f"timing an all-reduce among {number} workers")
        with redirect_stdout(sys.stderr):  # results own stdout
            seconds = plan.vocabulary.manager.hook.ptpipe_time_all_reduce(workers=number, sizes_bytes=_SIZES_BYTES)
        if seconds is None:
            _tell("no loaded plugin times an all-reduce")
            break
        times += [AllReduceTime(number, size, found) for size, found in zip(_SIZES_BYTES, seconds, strict=True)]
    return times


def _print(report: Report) -> None:
    subject = report.subject
    click.echo(
        f"{subject.stage} ({subject.kind}) of {subject.manifest}: {subject.images_per_worker} images a worker and "
        "batch, one thread a worker\n"
    )
    _print_measured(report)
    _print_fits(report)
    for mode in report.modes:
        _print_predicted(report, mode)
    for title, lines in (("assumed", report.assumptions), ("to note", report.notices)):
        if lines:
            click.echo("\n".join((f"\n{title}", *(f"- {line}" for line in lines))))


def _print_measured(report: Report) -> None:
    rows = []
    for item in report.throughputs:
        images = (f"{item.images_per_s:,.0f}", f"{min(item.rounds):,.0f} to {max(item.rounds):,.0f}")
        ratios = (f"{report.speedup(item):.2f}x", f"{report.efficiency(item):.1%}")
        rows.append((item.mode, str(item.workers), *images, f"{1000 * item.step_s:.3g}", *ratios))
    print_table(("mode", "workers", "images/s", "rounds", "step, ms", "speedup", "efficiency"), rows)


def _print_fits(report: Report) -> None:
    rows = []
    for mode, law in report.amdahl.items():
        bound = law.greatest_speedup
        most = f"at most {bound:.3g}x, whatever the number" if math.isfinite(bound) else "no bound to be seen"
        rows.append((f"{mode}: Amdahl's serial share", f"{law.serial_share:.2%}", most))
    if report.fit:
        link = report.fit.link
        rows.append(
            ("all-reduce: latency a message", f"{link.latency_us:.3g} us", f"fit is off by {report.fit.error:.0%}")
        )
        rows.append(("all-reduce: bandwidth", f"{link.bandwidth_gbit_s:.3g} Gbit/s", ""))
    rows += [(f"{mode}: gradients", f"{size / 1e6:.3g} MB", "") for mode, size in report.gradient_bytes.items()]
    if rows:
        click.echo("")
        print_table(("fitted", "", ""), rows)


def _print_predicted(report: Report, mode: str) -> None:
    from ptpipe.scaling import PREDICTED

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
    headings = ["workers", "measured", *(("messages, ms", "predicted by messages") if predictions else ())]
    click.echo(f"\n{mode}: efficiency" + ("" if predictions else "; there is no model of what this mode sends"))
    print_table([*headings, "by Amdahl's law"] if law else headings, rows)
