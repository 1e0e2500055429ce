"""The plot of `ptpipe scaling`. The only file that uses matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptpipe import UsageError, write_atomically
from ptpipe_elastic.scaling.fit import PREDICTED, predict
from ptpipe_elastic.scaling.report import PASSES

if TYPE_CHECKING:
    from ptpipe_elastic.scaling.report import Report

_FILE = "scaling.svg"
_COLORS = ("#1f6fb4", "#d1622b", "#3a8f4d", "#7b58a6")
_NEUTRAL = "#777777"
_DASHES = (0, (4, 3))
_FAINT = 0.25


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def open_folder(folder: Path) -> None:
    """Create the folder before minutes are spent on its content. Raises UsageError if that fails."""
    with _usage_error_for(folder):
        folder.mkdir(parents=True, exist_ok=True)


def draw(report: Report, folder: Path) -> Path | None:
    """Write `scaling.svg` and return its path; None without matplotlib. Raises UsageError if it can't be written."""
    if not can_draw():
        return None
    from io import StringIO

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Reproducible bytes; text stays text.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ptpipe", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        _draw_axes(figure.subplots(), report)
        svg = StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    path = folder / _FILE
    with _usage_error_for(folder):
        write_atomically(path, svg.getvalue().encode())
    return path


@contextmanager
def _usage_error_for(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--output {folder} can't be written to: {error.strerror or error}") from error


def _draw_axes(axes: Any, report: Report) -> None:
    axes.axhline(100, color=_NEUTRAL, linewidth=1, linestyle=_DASHES)
    colors = {mode: _COLORS[number % len(_COLORS)] for number, mode in enumerate(report.modes)}
    for mode, color in colors.items():
        _draw_mode(axes, report, mode, color)
    axes.plot([1], [100], "o", color=_NEUTRAL, zorder=3)  # a single worker has no mode
    ticks = PREDICTED if colors else (1, 2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 5 + max(100, *(100 * report.efficiency(item) for item in (report.single, *report.throughputs))))
    axes.set_xlabel("workers")
    axes.set_ylabel("efficiency (samples/s per worker, % of a single worker's)")
    subject = report.subject
    axes.set_title(
        f"{subject.stage} of {Path(subject.manifest).name}: {subject.samples_per_worker} samples per worker and batch",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=_legend(report, colors), frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _draw_mode(axes: Any, report: Report, mode: str, color: str) -> None:
    workers = range(1, PREDICTED[-1] + 1)
    if (size := report.gradient_bytes.get(mode)) is not None and report.link:
        rows = predict(report.single.step_s, size, report.link, workers, PASSES[mode])
        low, high = [100 * row.efficiency_low for row in rows], [100 * row.efficiency_high for row in rows]
        axes.fill_between(workers, low, high, color=color, alpha=_FAINT, linewidth=0)
    if law := report.amdahl.get(mode):
        axes.plot(workers, [100 * law.efficiency(number) for number in workers], color=color, linewidth=1.2)
    points = [item for item in report.throughputs if item.mode == mode]
    heights = [100 * report.efficiency(item) for item in points]
    axes.plot([item.workers for item in points], heights, "o", color=color, zorder=3)


def _legend(report: Report, colors: Mapping[str, str]) -> list[Any]:
    """The meaning of each color and line style."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=mode) for mode, color in colors.items()]
    handles.append(Line2D([], [], color=_NEUTRAL, linewidth=0, marker="o", label="measured"))
    if report.amdahl:
        handles.append(Line2D([], [], color=_NEUTRAL, linewidth=1.2, label="Amdahl's law, fitted"))
    if report.predictions:
        handles.append(Patch(color=_NEUTRAL, alpha=_FAINT, linewidth=0, label="from latency, bandwidth"))
    handles.append(Line2D([], [], color=_NEUTRAL, linewidth=1, linestyle=_DASHES, label="ideal"))
    return handles
