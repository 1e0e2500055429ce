"""The plot of `ptpipe scaling`: the one file that knows matplotlib, which need not be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptpipe.cli.scaling_report import PASSES
from ptpipe.errors import UsageError
from ptpipe.scaling import PREDICTED, predict
from ptpipe.store.files import write_atomically

if TYPE_CHECKING:
    from ptpipe.cli.scaling_report import Report

_FILE = "scaling.svg"
_COLOURS = ("#1f6fb4", "#d1622b", "#3a8f4d", "#7b58a6")
_STILL = "#777777"
_DASHES = (0, (4, 3))
_FAINT = 0.25


def can_draw() -> bool:
    """Whether matplotlib is there."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def open_folder(folder: Path) -> None:
    """Make it, before minutes are spent on what shall go there. Raises UsageError where that can't be."""
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)


def draw(report: Report, folder: Path) -> Path | None:
    """Write `scaling.svg` into the folder; None where matplotlib isn't there. Raises UsageError where that can't be."""
    if not can_draw():
        return None
    from io import StringIO

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The same figures give the same bytes; text stays text.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ptpipe", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        _draw_axes(figure.subplots(), report)
        svg = StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    path = folder / _FILE
    with _told(folder):
        write_atomically(path, svg.getvalue().encode())
    return path


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--output {folder} can't be written to: {error.strerror or error}") from error


def _draw_axes(axes: Any, report: Report) -> None:
    axes.axhline(100, color=_STILL, linewidth=1, linestyle=_DASHES)
    colours = {mode: _COLOURS[number % len(_COLOURS)] for number, mode in enumerate(report.modes)}
    for mode, colour in colours.items():
        _draw_mode(axes, report, mode, colour)
    axes.plot([1], [100], "o", color=_STILL, zorder=3)  # one worker is of no mode
    ticks = PREDICTED if colours else (1, 2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 5 + max(100, *(100 * report.efficiency(item) for item in (report.alone, *report.throughputs))))
    axes.set_xlabel("workers")
    axes.set_ylabel("efficiency (% of one worker's images/s, each)")
    subject = report.subject
    axes.set_title(
        f"{subject.stage} of {Path(subject.manifest).name}: {subject.images_per_worker} images a worker and batch",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=_legend(report, colours), frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _draw_mode(axes: Any, report: Report, mode: str, colour: str) -> None:
    workers = range(1, PREDICTED[-1] + 1)
    if (size := report.gradient_bytes.get(mode)) is not None and report.link:
        rows = predict(report.alone.step_s, size, report.link, workers, PASSES[mode])
        low, high = [100 * row.efficiency_low for row in rows], [100 * row.efficiency_high for row in rows]
        axes.fill_between(workers, low, high, color=colour, alpha=_FAINT, linewidth=0)
    if law := report.amdahl.get(mode):
        axes.plot(workers, [100 * law.efficiency(number) for number in workers], color=colour, linewidth=1.2)
    points = [item for item in report.throughputs if item.mode == mode]
    heights = [100 * report.efficiency(item) for item in points]
    axes.plot([item.workers for item in points], heights, "o", color=colour, zorder=3)


def _legend(report: Report, colours: Mapping[str, str]) -> list[Any]:
    """What each colour and each shape says."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=mode) for mode, colour in colours.items()]
    handles.append(Line2D([], [], color=_STILL, linewidth=0, marker="o", label="measured"))
    if report.amdahl:
        handles.append(Line2D([], [], color=_STILL, linewidth=1.2, label="Amdahl's law, fitted"))
    if report.predictions:
        handles.append(Patch(color=_STILL, alpha=_FAINT, linewidth=0, label="from latency, bandwidth"))
    handles.append(Line2D([], [], color=_STILL, linewidth=1, linestyle=_DASHES, label="ideal"))
    return handles
