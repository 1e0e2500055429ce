"""The first glance at a report: whether to ship, what, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ptpipe import Decision, ExitCode, Outcome, RunFinished, StageFinished
from ptpipe_report import run_summary
from ptpipe_report.comparison import latency_label
from ptpipe_report.formatting import counted, seconds_text
from ptpipe_report.html.artifacts import Artifact, Artifacts, Cell, drop_text
from ptpipe_report.run_summary import Gate, candidates_of, listed


@dataclass(frozen=True)
class Tile:
    """One reason, as a large figure."""

    label: str
    figure: str
    note: str
    tone: str = ""
    """`good`, `bad`, `unsure` or nothing."""


@dataclass(frozen=True)
class Banner:
    """How the run ended."""

    state: str
    """`passed`, `refused`, `undecided`, `failed`, `interrupted` or `done`."""
    headline: str
    note: str
    gates: Sequence[Gate]
    failures: Sequence[StageFinished]
    tiles: Sequence[Tile] = ()
    files: Sequence[str] = ()
    """To ship: relative to the run's folder."""


def banner(run: RunFinished, comparisons: Sequence[Artifacts]) -> Banner:
    """Return the verdict of a run on the models that it compared."""
    gates = run_summary.gates(run.stages)
    failures = run_summary.failed_stages(run.stages)
    state = _state(run, gates)
    candidates = candidates_of(gates, state if state in (Decision.REFUSED, Decision.UNDECIDED) else None)
    num_cached = sum(stage.outcome is Outcome.CACHED for stage in run.stages)
    cached = f", {num_cached} of them cached" if num_cached else ""
    note = f"{counted(len(run.stages), 'stage')}{cached}, in {seconds_text(run.seconds)}"
    headline = _headline(run, state, gates, candidates, failures)
    if len(candidates) != 1 or state in ("failed", "interrupted"):
        return Banner(state, headline, note, gates, failures)
    files = [path.as_posix() for path in run_summary.deliverables(run) if path.parts[0] == candidates[0]]
    tiles = _tiles(candidates[0], comparisons, gates)
    if state == "passed":  # a loss that is certain, and allowed, is no warning
        tiles = [replace(tile, tone="" if tile.tone == "bad" else tile.tone) for tile in tiles]
    return Banner(state, headline, note, gates, failures, tiles, files)


def _state(run: RunFinished, gates: Sequence[Gate]) -> str:
    if run.interrupted:
        return "interrupted"
    if run.exit_code not in (ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED):
        return "failed"
    decisions = {gate.decision for gate in gates}
    for decision in (Decision.REFUSED, Decision.UNDECIDED):
        if decision in decisions:
            return str(decision)
    return "passed" if gates else "done"


def _headline(
    run: RunFinished, state: str, gates: Sequence[Gate], candidates: Sequence[str], failures: Sequence[StageFinished]
) -> str:
    what = listed(candidates) or "this"
    named = {decision: listed([gate.stage_id for gate in gates if gate.decision == decision]) for decision in Decision}
    match state:
        case "passed":
            passed = (
                f"{'its' if len(candidates) == 1 else 'their'} gate passed"
                if len(gates) == 1
                else f"all {len(gates)} gates passed"
            )
            caveat = run_summary.caveat(run)
            return f"{passed.capitalize()}, but {caveat}" if caveat else f"Ship {what}: {passed}"
        case "refused":
            return f"Don\N{RIGHT SINGLE QUOTATION MARK}t ship {what}: refused by {named[Decision.REFUSED]}"
        case "undecided":
            return f"Undecided on {what}: {named[Decision.UNDECIDED]} can\N{RIGHT SINGLE QUOTATION MARK}t tell yet"
        case "interrupted":
            return "Interrupted: nothing is judged"
        case "failed":
            where = ", ".join(stage.stage_id for stage in failures)
            return f"Failed in {where}" if where else run_summary.ending(run).capitalize()
        case _:
            return f"Done: {counted(len(run.stages), 'stage')}, and no gate that judges"


def _tiles(candidate: str, comparisons: Sequence[Artifacts], gates: Sequence[Gate]) -> list[Tile]:
    """Return quality, size and latency of the candidate, each from the first comparison that has it."""
    tiles: dict[str, Tile] = {}
    for comparison in comparisons:
        row = comparison.row(candidate)
        if row is None or row.is_baseline:
            continue
        if row.drop is not None:
            tiles.setdefault("quality", _quality_tile(comparison, row, row.drop))
        tiles.setdefault("size", Tile("size", row.size_ratio, f"{row.size}; {comparison.baseline} has {row.base_size}"))
        if cell := _judged_cell(row.latencies, gates):
            tiles.setdefault("latency", _latency_tile(cell))
    return list(tiles.values())


def _quality_tile(comparison: Artifacts, row: Artifact, drop: Cell) -> Tile:
    samples = f"{comparison.num_samples:,} samples" if comparison.num_samples else ""
    value, low, high = (row.facts.get(comparison.drop_name + end) for end in ("", "_low", "_high"))
    label, figure, interval = comparison.drop_label, drop.text, drop.interval
    if isinstance(value, int | float) and value < 0:
        label = "points gained" if comparison.metric.get("is_fraction") else "better by"
        figure = drop_text(-value, comparison.metric)
        if isinstance(low, int | float) and isinstance(high, int | float):
            texts = [drop_text(-of, comparison.metric, high - low) for of in (value, high, low)]
            figure, interval = texts[0], f"[{texts[1]}, {texts[2]}]"
    note = ", ".join(part for part in (interval and f"95 % interval {interval}", samples) if part)
    return Tile(f"{comparison.metric_label}, {label}", figure, note, drop.tone)


def _judged_cell(cells: Sequence[Cell], gates: Sequence[Gate]) -> Cell | None:
    """Return the latency that a gate is about, else the first one."""
    wanted = [latency_label(gate.facts) for gate in gates if "batch_size" in gate.facts]
    return next((cell for cell in cells if cell.label in wanted), cells[0] if cells else None)


def _latency_tile(cell: Cell) -> Tile:
    return Tile(
        f"latency, {cell.label}", cell.ratio or cell.text, f"{cell.text}; {cell.verdict}".rstrip("; "), cell.tone
    )
